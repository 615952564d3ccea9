#include "certificate/integer_screen.hpp"

#include <algorithm>
#include <cmath>

#include "base/dtype.hpp"
#include "base/numeric.hpp"

// Section numbers in comments are those of certificate.md.

namespace dosa {
namespace {

constexpr double kMaxRow = 127;        // magnitude of an int8 row's components
constexpr double kQuarter = 4;         // step of keys and heads
constexpr int kLanes = 8;              // independent f64 sums
constexpr double kRelative = 0x1p-40;  // more than any sum or product formed here in f64 loses

using Vector = std::array<double, kMaxDim>;

// Vectors y_j in rows, zero beyond dim.
using Vectors = std::array<Vector, kMaxBoundRows>;

double dot(const Vector& a, const Vector& b) {
  std::array<double, kLanes> sum{};
  for (int d = 0; d < kMaxDim; d += kLanes) {
    for (int e = 0; e < kLanes; ++e) sum[e] += a[d + e] * b[d + e];
  }
  double total = 0;
  for (const double s : sum) total += s;
  return total;
}

double norm(const Vector& a) { return std::sqrt(dot(a, a)); }

void add(Vector& to, double factor, const Vector& from) {
  for (int d = 0; d < kMaxDim; ++d) to[d] += factor * from[d];
}

// The step of a row whose largest component becomes 127, as f32: it is part of a weight. At least 2^-120, so that
// weights stay normal.
double step_for(double largest) {
  return static_cast<double>(std::max(static_cast<float>(largest / kMaxRow), 0x1p-120F));
}

// To nearest, ties to even, for |x| < 2^51: the sum has no room for a fraction. A library call per component would cost
// more than everything else here.
double round_to_even(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

// row = round(y / step), clipped; y becomes the rest y - step * row. Returns ||step * row||.
double quantize(Vector& y, int dim, double step, std::int8_t* row) {
  Vector kept{};
  for (int d = 0; d < dim; ++d) {
    const double value = std::clamp(round_to_even(y[d] / step), -kMaxRow, kMaxRow);
    kept[d] = step * value;
    row[d] = static_cast<std::int8_t>(value);
  }
  add(y, -1, kept);
  return norm(kept);
}

double largest_magnitude(const Vector& y) {
  double largest = 0;
  for (const double v : y) largest = std::max(largest, std::abs(v));
  return largest;
}

// Section 6: sum_j [u_j . z]+ + linear . z <= (|| linear + 1/2 sum u || + 1/2 sqrt( sum |u_i . u_j| )) ||z||, u_j =
// factor_j y_j.
double joint_norm(const Vectors& y, const std::array<double, kMaxBoundRows>& factor, int relu_rows,
                  const Vector& linear) {
  Vector half = linear;
  double absolute = 0, size = 0;
  for (int i = 0; i < relu_rows; ++i) {
    add(half, 0.5 * factor[i], y[i]);
    double row = 0;
    for (int j = 0; j < i; ++j) row += 2 * std::abs(factor[j] * dot(y[i], y[j]));
    const double own = std::abs(factor[i]) * dot(y[i], y[i]);
    absolute += std::abs(factor[i]) * (row + own);
    size += std::sqrt(std::abs(factor[i]) * own);
  }
  const double error = kRelative * size;  // of the sums, which may cancel
  return norm(half) + error + 0.5 * std::sqrt(absolute + error * size);
}

}  // namespace

std::int8_t quarter_e4m3(std::uint8_t byte) noexcept {
  if (is_nan_e4m3(byte)) return (byte & 0x80) != 0 ? -120 : 120;
  return static_cast<std::int8_t>(std::nearbyint(kE4m3Table[byte] / static_cast<float>(kQuarter)));
}

IntegerCertificate make_integer(const Certificate& certificate, const QueryHeads& query,
                                std::span<const float> aux_rows, std::span<std::int8_t> rows,
                                const Allowances& allowances) {
  IntegerCertificate out;
  out.exempt = certificate.exempt;
  if (certificate.exempt) return out;
  const int dim = query.dim;
  const int relu_rows = certificate.rows - certificate.linear_rows;
  out.rows = certificate.rows;
  out.linear_rows = certificate.linear_rows;

  // Heads in steps of 4, auxiliary rows in steps of a 127th of their largest component. y keeps the exact vectors, rest
  // what rounding took from them; of the linear rows only the sums. The linear half of what the relu rows lost is
  // known, so a linear row takes it along.
  Vectors y, rest;  // filled row by row: zeroing them whole would cost more than the rest
  Vector linear{}, linear_rest{}, half{};
  std::array<double, kMaxBoundRows> value{}, step{};
  double unscreened_dots = 0;  // sum over retained heads of |w_h| ||q_h||: screen and reference dots differ
  double linear_size = 0;      // sum over linear rows of what their products may reach per unit of ||4 k8||
  for (int j = 0; j < out.rows; ++j) {
    const bool retained = j < certificate.retained;
    const float* from = retained ? query.q.data() + static_cast<std::size_t>(certificate.head[j]) * dim
                                 : aux_rows.data() + static_cast<std::size_t>(j - certificate.retained) * dim;
    y[j].fill(0);
    std::copy_n(from, dim, y[j].begin());
    rest[j] = y[j];
    value[j] = certificate.weight[j];
    if (j == relu_rows) {
      add(rest[j], 1 / value[j], half);
      add(linear_rest, -1, half);
    }
    step[j] = retained ? kQuarter : step_for(largest_magnitude(rest[j]));
    const double size = quantize(rest[j], dim, step[j], rows.data() + static_cast<std::size_t>(j) * dim);
    if (retained) unscreened_dots += std::abs(static_cast<double>(query.w[certificate.head[j]])) * norm(y[j]);
    if (j < relu_rows) {
      add(half, 0.5 * value[j], rest[j]);
      continue;
    }
    add(linear, value[j], y[j]);
    add(linear_rest, value[j], rest[j]);
    linear_size += std::abs(value[j]) * size;
  }

  // Section 6: rounding of rows meets ||4 k8|| <= ||k|| + ||e||, rounding of keys meets ||e||.
  const double scale = allowances.scale;
  const double chain = gamma_n(out.rows);
  const double per_row_error = scale * (joint_norm(rest, value, relu_rows, linear_rest) + chain * linear_size);
  const double per_key_error = scale * joint_norm(y, value, relu_rows, linear);
  const double dots = scale * gamma_n(dim - 1) * (1 + gamma_n(query.heads)) * unscreened_dots;
  const double root = std::sqrt(static_cast<double>(dim));
  const double floor = scale * 0x1p-143 * (out.rows + 2);
  const double start = 1 - scale * gamma_n(out.rows + 2);
  const double widen = 1 + scale * kRelative;
  const auto up = [&](double x) { return scale > 0 ? round_up(x) : static_cast<float>(x); };
  out.c = up((certificate.c + (per_row_error + dots + floor) * root) / start * widen);
  out.c_e = up((per_row_error + per_key_error) * root / start * widen);
  if (certificate.c == 0) out.c = out.c_e = 0;  // no active head

  bool finite = std::isfinite(out.c) && std::isfinite(out.c_e);
  for (int j = 0; j < out.rows; ++j) {
    const double exact = kQuarter * step[j] * value[j];  // k8 counts steps of 4, the row steps of step[j]
    const double loss = scale * gamma_n(out.rows - j);
    if (j >= relu_rows)
      out.weight[j] = static_cast<float>(exact);  // exact: -4 times an f32
    else if (exact >= 0)
      out.weight[j] = up(exact / (1 - loss) * widen);
    else
      out.weight[j] = up(exact / (1 + loss) / widen);
    finite = finite && std::isfinite(out.weight[j]);
  }
  out.exempt = !finite;
  return out;
}

float bound_reference(const IntegerCertificate& certificate, std::span<const std::int8_t> rows,
                      std::span<const std::int8_t> key, float rho, float rho_e) {
  float u = std::fma(certificate.c_e, rho_e, certificate.c * rho);
  for (int j = 0; j < certificate.rows; ++j) {
    const std::int8_t* row = rows.data() + static_cast<std::size_t>(j) * key.size();
    std::int32_t sum = 0;
    for (std::size_t d = 0; d < key.size(); ++d) sum += row[d] * key[d];
    const bool linear = j >= certificate.rows - certificate.linear_rows;
    const auto x = static_cast<float>(sum);
    u = std::fma(certificate.weight[j], linear ? x : relu(x), u);
  }
  return u;
}

void predict_bounds(const Certificate& certificate, const IntegerCertificate& integer, const PanelDots& panel,
                    std::span<const float> rho, std::span<const float> rho_e, std::span<float> u) {
  Certificate widened = certificate;
  widened.c = integer.c;
  predict_bounds(widened, panel, rho, u);
  for (int i = 0; i < panel.keys; ++i) u[i] += integer.c_e * rho_e[i];
}

}  // namespace dosa
