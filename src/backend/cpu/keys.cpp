#include "backend/cpu/keys.hpp"

#include <cmath>
#include <limits>

namespace dosa::cpu {
namespace {

constexpr int kMaxKeyBytes = 128;

}  // namespace

const std::uint8_t* KeySource::adjacent(const std::uint8_t* row, std::uint8_t* copy) const noexcept {
  const std::int64_t stride = keys.component_stride();
  if (stride == 1) return row;
  for (int i = 0; i < dim; ++i) copy[i] = row[i * stride];
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

std::int64_t summarize_keys(const Kernels& kernels, const KeySource& keys, std::int64_t begin, std::int64_t end,
                            const KeySummaries& summaries) {
  alignas(64) float panel[kMaxKeyBytes * kPanelKeys];
  alignas(64) std::uint8_t copies[kMaxKeyBytes * kPanelKeys];
  const std::uint8_t* rows[kPanelKeys];
  std::int64_t exempt = 0;
  for (std::int64_t first = begin; first < end; first += kPanelKeys) {
    keys.load(first, keys.count, copies, rows);
    kernels.pack_panel(rows, keys.dim, panel);
    kernels.norm_panel(panel, keys.dim, summaries.rho + first, summaries.rho_e + first);
    for (std::int64_t key = first; key < first + kPanelKeys; ++key) {
      const float scale = key < keys.count ? keys.scale(key) : 0.0F;
      const bool is_exempt = std::isnan(summaries.rho[key]) || !(scale >= 0.0F) || std::isinf(scale);
      summaries.alpha[key] = is_exempt ? 1.0F : scale;
      if (!is_exempt) continue;
      ++exempt;
      summaries.rho[key] = std::numeric_limits<float>::infinity();
      summaries.rho_e[key] = 0.0F;
    }
  }
  return exempt;
}

}  // namespace dosa::cpu
