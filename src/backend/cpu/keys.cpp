#include "backend/cpu/keys.hpp"

#include <bit>
#include <cmath>
#include <limits>

namespace dosa::cpu {

const std::uint8_t* KeySource::copy_row(const std::uint8_t* row, std::uint8_t* copy) const noexcept {
  for (int i = 0; i < dim; ++i) copy[i] = row[i * keys.component_stride()];
  return copy;
}

void KeySource::load(std::span<const std::int32_t> ids, std::uint8_t* copies, const std::uint8_t** rows) const noexcept {
  for (std::size_t i = 0; i < kPanelKeys; ++i) {
    rows[i] = i < ids.size() ? adjacent(keys.row(ids[i]), copies + i * static_cast<std::size_t>(dim)) : KeyRows::kZeroRow;
  }
}

void KeySource::load(std::int64_t first, std::int64_t end, std::uint8_t* copies, const std::uint8_t** rows) const noexcept {
  std::fill_n(rows, kPanelKeys, KeyRows::kZeroRow);
  visit_rows(first, std::min(end, first + kPanelKeys), [&](std::int64_t key, const std::uint8_t* row) {
    rows[key - first] = adjacent(row, copies + (key - first) * dim);
  });
}

void KeySource::load_scales(std::int64_t first, float* scales) const noexcept {
  std::fill_n(scales, kPanelKeys, 0.0F);
  const std::int64_t end = std::min(count, first + kPanelKeys);
  while (first < end) {
    const KeyRows::Run run = keys.run(first);
    const std::int64_t n = std::min(end - first, run.keys);
    if (run.scale_stride == 1) {
      std::copy_n(run.scales, n, scales);
    } else {
      for (std::int64_t i = 0; i < n; ++i) scales[i] = run.scales[i * run.scale_stride];
    }
    scales += n;
    first += n;
  }
}

std::uint64_t exempt_odd_keys(const float* scales, const KeySummaries& summaries) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  // As integers, and so in vectors: floats that are finite and have no sign are those from 0 to 0x7F7FFFFF.
  std::uint32_t odd = 0;
  for (int key = 0; key < kPanelKeys; ++key) {
    const auto scale = std::bit_cast<std::uint32_t>(scales[key]), rho = std::bit_cast<std::uint32_t>(summaries.rho[key]);
    odd |= scale | (0x7F7FFFFFU - scale) | rho | (0x7F7FFFFFU - rho);
  }
  if (odd < 0x80000000U) {
    std::copy_n(scales, kPanelKeys, summaries.alpha);
    return 0;
  }
  std::uint64_t exempt = 0;
  for (int key = 0; key < kPanelKeys; ++key) {
    const bool is_exempt = std::isnan(summaries.rho[key]) || !(scales[key] >= 0.0F) || std::isinf(scales[key]);
    summaries.alpha[key] = is_exempt ? 1.0F : scales[key];
    summaries.rho[key] = is_exempt ? infinity : summaries.rho[key];
    summaries.rho_e[key] = is_exempt ? 0.0F : summaries.rho_e[key];
    exempt |= std::uint64_t{is_exempt} << key;
  }
  return exempt;
}

std::uint64_t summarize_panel(const Kernels& kernels, int dim, const std::uint8_t* const* rows, const float* scales,
                              const KeySummaries& summaries) {
  kernels.norm_keys(rows, dim, summaries.rho, summaries.rho_e);
  return exempt_odd_keys(scales, summaries);
}

std::int64_t summarize_keys(const Kernels& kernels, const KeySource& keys, std::int64_t begin, std::int64_t end,
                            const KeySummaries& summaries) {
  alignas(64) std::uint8_t copies[kMaxKeyBytes * kPanelKeys];
  const std::uint8_t* rows[kPanelKeys];
  float scales[kPanelKeys];
  std::int64_t exempt = 0;
  for (std::int64_t first = begin; first < end; first += kPanelKeys) {
    keys.load(first, keys.count, copies, rows);
    keys.load_scales(first, scales);
    exempt += std::popcount(summarize_panel(kernels, keys.dim, rows, scales, summaries.from(first)));
  }
  return exempt;
}

}  // namespace dosa::cpu
