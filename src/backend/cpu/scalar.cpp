// The kernels in plain code: the fallback of every CPU, and what the vector kernels are compared with.
#include <cmath>

#include "backend/cpu/kernels.hpp"
#include "base/dtype.hpp"
#include "base/numeric.hpp"

namespace dosa::cpu {
namespace {

float packed(const float* rows, int dim, int row, int i) {
  return rows[(row / kRowGroup * dim + i) * kRowGroup + row % kRowGroup];
}

float dot(const float* panel, const float* rows, int dim, int row, int key) {
  float x = 0.0F;
  for (int i = 0; i < dim; ++i) x = std::fma(packed(rows, dim, row, i), panel[i * kPanelKeys + key], x);
  return x;
}

void pack_panel(const std::uint8_t* const* keys, int dim, float* panel) {
  for (int key = 0; key < kPanelKeys; ++key) {
    for (int i = 0; i < dim; ++i) panel[i * kPanelKeys + key] = kE4m3Table[keys[key][i]];
  }
}

void score_panel(const ScoreArgs& args, float* scores) {
  for (int key = 0; key < kPanelKeys; ++key) {
    float sum = 0.0F;
    for (int head = 0; head < args.heads; ++head) {
      sum = std::fma(args.w[head], relu(dot(args.panel, args.q, args.dim, head, key)), sum);
    }
    scores[key] = args.k_scale[key] * sum;
  }
}

void dot_panel(const float* panel, const float* q, int dim, int rows, float* x, std::int64_t stride) {
  for (int row = 0; row < rows; ++row) {
    for (int key = 0; key < kPanelKeys; ++key) x[row * stride + key] = dot(panel, q, dim, row, key);
  }
}

void bound_panel(const BoundArgs& args, float* bounds) {
  for (int key = 0; key < kPanelKeys; ++key) {
    float u = args.c * args.rho[key];
    for (int row = 0; row < args.rows; ++row) {
      const float x = dot(args.panel, args.row_data, args.dim, row, key);
      u = std::fma(args.weight[row], row < args.rows - args.linear_rows ? relu(x) : x, u);
    }
    bounds[key] = args.alpha[key] * u;
  }
}

void norm_panel(const float* panel, int dim, float* rho, float* rho_e) {
  for (int key = 0; key < kPanelKeys; ++key) {
    float sum = 0.0F;
    float sum_e = 0.0F;
    for (int i = 0; i < dim; ++i) {
      const float k = panel[i * kPanelKeys + key];
      const float e = std::fma(-4.0F, std::nearbyint(k * 0.25F), k);
      sum = std::fma(k, k, sum);
      sum_e = std::fma(e, e, sum_e);
    }
    rho[key] = sum == 0.0F ? 0.0F : std::sqrt(sum < kSmallestSquare ? kSmallestSquare : sum) * norm_factor(dim);
    rho_e[key] = std::sqrt(sum_e) * norm_factor(dim);
  }
}

void norm_keys(const std::uint8_t* const* keys, int dim, float* rho, float* rho_e) {
  float panel[kMaxKeyBytes * kPanelKeys];
  pack_panel(keys, dim, panel);
  norm_panel(panel, dim, rho, rho_e);
}

std::int64_t collect_at_least(const float* u, std::int64_t n, float low, std::int32_t* out) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (!(u[i] < low)) out[count++] = static_cast<std::int32_t>(i);
  }
  return count;
}

std::int64_t collect_between(const float* u, std::int64_t n, float low, float high, std::int32_t* out) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (!(u[i] < low) && u[i] < high) out[count++] = static_cast<std::int32_t>(i);
  }
  return count;
}

}  // namespace

extern constexpr Kernels kScalarKernels{"scalar",   pack_panel,       score_panel,     dot_panel, bound_panel, norm_keys,
                                        norm_panel, collect_at_least, collect_between, nullptr,   nullptr,     nullptr};

}  // namespace dosa::cpu
