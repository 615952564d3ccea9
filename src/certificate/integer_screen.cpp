#include "certificate/integer_screen.hpp"

#include <algorithm>
#include <cmath>

#include "base/dtype.hpp"
#include "base/numeric.hpp"

// Section numbers in comments are those of certificate.md.

namespace dosa {
namespace {

constexpr int kMaxRow = 127;           // magnitude of an int8 row's components
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

// The smallest power of two s with largest <= 127 s, at least 2^-120 so that weights stay normal.
double step_for(double largest) {
  int exponent = 0;
  const double mantissa = std::frexp(largest / kMaxRow, &exponent);  // in [1/2, 1)
  if (mantissa == 0.5) --exponent;
  return std::ldexp(1.0, std::max(exponent, -120));
}

// row = round(y / step), clipped; y becomes the rest y - step * row. Returns the largest |row|.
int quantize(Vector& y, int dim, double step, std::int8_t* row) {
  int largest = 0;
  for (int d = 0; d < dim; ++d) {
    const int value = std::clamp(static_cast<int>(std::nearbyint(y[d] / step)), -kMaxRow, kMaxRow);
    row[d] = static_cast<std::int8_t>(value);
    y[d] -= step * value;
    largest = std::max(largest, std::abs(value));
  }
  return largest;
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
  const int dim = query.dim;
  const int relu_rows = certificate.rows - certificate.linear_rows;
  if (certificate.exempt || relu_rows + 2 * certificate.linear_rows > kMaxBoundRows) {
    out.exempt = true;
    return out;
  }
  const auto row_at = [&](int j) { return rows.data() + static_cast<std::size_t>(j) * dim; };

  // Relu rows: retained heads in steps of 4, auxiliary ones in steps of a power of two. y keeps the exact vectors, rest
  // what rounding took from them, step the weight's share of the scale.
  Vectors y, rest;  // filled row by row: zeroing them whole would cost more than the rest
  std::array<double, kMaxBoundRows> value{}, step{};
  double unscreened_dots = 0;  // sum over retained heads of |w_h| ||q_h||: screen and reference dots differ
  for (int j = 0; j < relu_rows; ++j) {
    const bool retained = j < certificate.retained;
    const float* from = retained ? query.q.data() + static_cast<std::size_t>(certificate.head[j]) * dim
                                 : aux_rows.data() + static_cast<std::size_t>(j - certificate.retained) * dim;
    y[j].fill(0);
    std::copy_n(from, dim, y[j].begin());
    rest[j] = y[j];
    value[j] = certificate.weight[j];
    step[j] = retained ? kQuarter : step_for(largest_magnitude(y[j]));
    quantize(rest[j], dim, step[j], row_at(j));
    if (retained) unscreened_dots += std::abs(static_cast<double>(query.w[certificate.head[j]])) * norm(y[j]);
  }
  out.rows = relu_rows;

  // Linear rows: a high and a low row, the low one dropped where the high one is exact.
  Vector linear{}, linear_rest{};
  double pair_size = 0;  // sum of step * ||row||, for the chain's rounding
  for (int j = relu_rows; j < certificate.rows; ++j) {
    Vector vector{};
    std::copy_n(aux_rows.data() + static_cast<std::size_t>(j - certificate.retained) * dim, dim, vector.begin());
    const double v = certificate.weight[j];
    add(linear, v, vector);
    for (int part = 0; part < 2; ++part) {
      const double size = step_for(largest_magnitude(vector));
      std::int8_t* row = row_at(out.rows);
      if (quantize(vector, dim, size, row) == 0) continue;
      double square = 0;
      for (int d = 0; d < dim; ++d) square += static_cast<double>(row[d]) * row[d];
      value[out.rows] = v;
      step[out.rows] = size;
      pair_size += std::abs(v) * size * std::sqrt(square);
      ++out.rows;
      ++out.linear_rows;
    }
    add(linear_rest, v, vector);
  }

  // Section 6: rounding of rows meets ||4 k8|| <= ||k|| + ||e||, rounding of keys meets ||e||.
  std::array<double, kMaxBoundRows> factor{};
  for (int j = 0; j < relu_rows; ++j) factor[j] = value[j];
  const double scale = allowances.scale;
  const double chain = gamma_n(out.rows);
  const double per_row_error =
      scale * (joint_norm(rest, factor, relu_rows, linear_rest) + chain * pair_size * (1 + kRelative));
  const double per_key_error = scale * joint_norm(y, factor, relu_rows, linear);
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
      out.weight[j] = static_cast<float>(exact);  // a power of two
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
