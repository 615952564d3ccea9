#include "backend/cpu/keys.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/numeric.hpp"

namespace dosa::cpu {
namespace {

constexpr int kMaxKeyBytes = 128;
alignas(64) constexpr std::uint8_t kZeroRow[kMaxKeyBytes] = {};

// rho with rho * sqrt(dim) >= sqrt(exact sum of squares), from the sum as an f32 FMA chain. The chain errs by at most
// gamma(dim) relative (squares of E4M3 values are far from underflow); the rest is done in f64 and rounded up.
float norm_summary(float square, int dim) noexcept {
  return round_up(std::sqrt(static_cast<double>(square) * (1.0 + 2.0 * gamma_n(dim)) / dim) * (1.0 + 0x1p-50));
}

}  // namespace

const std::uint8_t* KeySource::row(std::int64_t key, std::uint8_t* copy) const noexcept {
  const auto* bytes = k.at<std::uint8_t>(key);
  const std::int64_t stride = k.stride[1];
  if (stride == 1) return bytes;
  for (int i = 0; i < dim; ++i) copy[i] = bytes[i * stride];
  return copy;
}

void KeySource::load(std::span<const std::int32_t> ids, std::uint8_t* copies, const std::uint8_t** rows) const noexcept {
  for (std::size_t i = 0; i < kPanelKeys; ++i) {
    rows[i] = i < ids.size() ? row(ids[i], copies + i * static_cast<std::size_t>(dim)) : kZeroRow;
  }
}

void KeySource::load(std::int64_t first, std::int64_t end, std::uint8_t* copies, const std::uint8_t** rows) const noexcept {
  for (std::int64_t i = 0; i < kPanelKeys; ++i) {
    rows[i] = first + i < end ? row(first + i, copies + i * dim) : kZeroRow;
  }
}

std::int64_t summarize_keys(const Kernels& kernels, const KeySource& keys, std::int64_t begin, std::int64_t end,
                            const KeySummaries& summaries) {
  alignas(64) float panel[kMaxKeyBytes * kPanelKeys];
  alignas(64) std::uint8_t copies[kMaxKeyBytes * kPanelKeys];
  float square[kPanelKeys];
  float square_e[kPanelKeys];
  const std::uint8_t* rows[kPanelKeys];
  const double smallest = 0x1p-6;
  std::int64_t exempt = 0;
  for (std::int64_t first = begin; first < end; first += kPanelKeys) {
    keys.load(first, keys.count, copies, rows);
    kernels.pack_panel(rows, keys.dim, panel);
    kernels.norm_panel(panel, keys.dim, square, square_e);
    for (int i = 0; i < kPanelKeys; ++i) {
      const std::int64_t key = first + i;
      const float scale = key < keys.count ? keys.scale(key) : 0.0F;
      const bool is_exempt = std::isnan(square[i]) || !(scale >= 0.0F) || std::isinf(scale);
      exempt += is_exempt ? 1 : 0;
      summaries.alpha[key] = is_exempt ? 1.0F : scale;
      summaries.rho[key] = is_exempt          ? std::numeric_limits<float>::infinity()
                           : square[i] == 0.0F ? 0.0F
                                               : norm_summary(std::max(square[i], static_cast<float>(smallest * smallest)), keys.dim);
      if (summaries.rho_e != nullptr) {
        summaries.rho_e[key] = is_exempt || square_e[i] == 0.0F ? 0.0F : norm_summary(square_e[i], keys.dim);
      }
    }
  }
  return exempt;
}

}  // namespace dosa::cpu
