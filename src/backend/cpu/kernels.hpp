// The CPU's inner loops. Written once (kernels-inl.hpp), compiled per instruction set, listed and forceable by name.
//
// Keys sit in lanes: a panel is 48 keys transposed to [dim][48], so a dot is one FMA chain per lane over the components in
// order, the reference order, whatever the vector width. Query rows are packed in groups of four: [group][dim][4].
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

namespace dosa::cpu {

inline constexpr int kPanelKeys = 48;  // 3 vectors of 16 lanes, 6 of 8, 12 of 4
inline constexpr int kMaxKeyBytes = 128;
inline constexpr int kRowGroup = 4;    // rows whose accumulators are in registers at once

constexpr int round_up_to(int value, int multiple) noexcept { return (value + multiple - 1) / multiple * multiple; }

/// Reference scores of one query for one panel.
struct ScoreArgs {
  const float* panel;    // [dim][48]
  const float* q;        // [heads/4, rounded up][dim][4], padding rows zero
  const float* w;        // [heads]
  const float* k_scale;  // [48]
  int dim;
  int heads;
};

/// Upper bounds of one query for one panel (certificate.hpp has the formula).
struct BoundArgs {
  const float* panel;   // [dim][48]
  const float* row_data;  // [rows/4, rounded up][dim][4], padding rows zero
  const float* weight;  // [rows]
  const float* alpha;   // [48] key scales as the bound may use them: 1 for exempt keys
  const float* rho;     // [48] key norms, +inf for exempt keys
  int dim;
  int rows;
  int linear_rows;  // the last linear_rows rows are not passed through relu
  float c;
};

/// The same with integer rows (integer_screen.hpp).
struct IntegerBoundArgs {
  const std::uint32_t* panel;  // [dim/4][48], four bytes k8 + 128 a word
  const std::uint32_t* row_data;  // [rows/4, rounded up][dim/4][4], four signed bytes a word
  const std::int32_t* offset;  // [rows/4, rounded up][4], -128 * sum of the row's bytes
  const float* weight;
  const float* alpha;
  const float* rho;
  const float* rho_e;  // [48] norms of k - 4 k8
  int dim;
  int rows;
  int linear_rows;
  float c;
  float c_e;
};

/// What norm_keys multiplies f32 square roots with. An f32 chain of dim squares errs by gamma(128) < 2^-16.9, its root by half
/// of that; the root, this product and this constant round once each.
inline float norm_factor(int dim) noexcept { return static_cast<float>((1.0 + 0x1p-17) / std::sqrt(static_cast<double>(dim))); }
inline constexpr float kSmallestSquare = 0x1p-12F;  // norms of keys that are not zero count as 2^-6 at least

struct Kernels {
  std::string_view name;

  /// Decodes 48 key rows of `dim` bytes to a panel [dim][48]. dim is a multiple of 16.
  void (*pack_panel)(const std::uint8_t* const* keys, int dim, float* panel);
  /// Reference scores [48]: every element has the bits of reference_score(cpu, ...).
  void (*score_panel)(const ScoreArgs& args, float* scores);
  /// Raw dots of `rows` rows: x[row * stride + key].
  void (*dot_panel)(const float* panel, const float* q, int dim, int rows, float* x, std::int64_t stride);
  /// fl(alpha * u) [48].
  void (*bound_panel)(const BoundArgs& args, float* bounds);
  /// Per key row: rho with rho sqrt(dim) >= max(||k||, 2^-6), 0 for a zero key, NaN if the key holds a NaN byte; and rho_e with
  /// rho_e sqrt(dim) >= ||k - 4 k8||. At most 2^-16 too large, relatively, if components below 1/4 count as multiples of 2^-5
  /// away from zero.
  void (*norm_keys)(const std::uint8_t* const* keys, int dim, float* rho, float* rho_e);
  /// The same of the keys in a panel.
  void (*norm_panel)(const float* panel, int dim, float* rho, float* rho_e);

  /// Positions i in [0, n) with !(u[i] < low), ascending; returns their number. `out` has room for n.
  std::int64_t (*collect_at_least)(const float* u, std::int64_t n, float low, std::int32_t* out);
  /// Positions with !(u[i] < low) and u[i] < high.
  std::int64_t (*collect_between)(const float* u, std::int64_t n, float low, float high, std::int32_t* out);

  // Null where the instruction set has no u8 x i8 dot product with 32-bit sums.
  void (*pack_panel_i8)(const std::uint8_t* const* keys, int dim, std::uint32_t* panel);
  void (*pack_and_norm_panel_i8)(const std::uint8_t* const* keys, int dim, std::uint32_t* panel, float* rho, float* rho_e);
  void (*bound_panel_i8)(const IntegerBoundArgs& args, float* bounds);
};

/// Implementations that this CPU runs, fastest first; "scalar" is always last.
std::span<const Kernels* const> available_kernels() noexcept;

/// nullptr if there is none of that name here.
const Kernels* find_kernels(std::string_view name) noexcept;

extern const Kernels kScalarKernels;

}  // namespace dosa::cpu
