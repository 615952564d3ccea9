// The certificate, in f32 and in integers: never below the reference score, not looser than derived, and below it as
// soon as the allowances are missing.
#include "certificate/certificate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "base/dtype.hpp"
#include "base/numeric.hpp"
#include "certificate/integer_screen.hpp"
#include "certificate/slack.hpp"
#include "score/quantize.hpp"
#include "score/reference.hpp"

namespace dosa {
namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<std::uint8_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float chain(const float* a, const float* b, int dim) {
  float sum = 0;
  for (int d = 0; d < dim; ++d) sum = std::fma(a[d], b[d], sum);
  return sum;
}

float norm_summary(const std::vector<double>& v, int dim) {
  double square = 0;
  for (const double x : v) square += x * x;
  return round_up(std::sqrt(square / dim) * (1 + 0x1p-50));
}

// One query and some keys, with everything that a certificate is made from.
struct Sample {
  int heads, dim, keys = 0;
  Bytes q_bytes, k_bytes;
  std::vector<float> q, w, gram, k;
  std::vector<std::int8_t> k8;
  std::vector<float> x, rho, rho_e, score;  // x [heads, keys]; score: reference head sum
  std::vector<std::int32_t> focus;
  double gram_error = 0;

  Sample(Bytes q_, std::vector<float> w_, Bytes k_, int dim_)
      : heads(static_cast<int>(w_.size())),
        dim(dim_),
        q_bytes(std::move(q_)),
        k_bytes(std::move(k_)),
        w(std::move(w_)) {
    keys = static_cast<int>(k_bytes.size()) / dim;
    for (const std::uint8_t b : q_bytes) q.push_back(kE4m3Table[b]);
    for (const std::uint8_t b : k_bytes) k.push_back(kE4m3Table[b]), k8.push_back(quarter_e4m3(b));
    for (int h = 0; h < heads; ++h) {
      for (int l = 0; l < heads; ++l) gram.push_back(chain(&q[h * dim], &q[l * dim], dim));
      for (int i = 0; i < keys; ++i) x.push_back(chain(&q[h * dim], &k[i * dim], dim));
    }
    gram_error = gamma_n(dim);
    for (int i = 0; i < keys; ++i) {
      const std::vector<double> key(k.begin() + i * dim, k.begin() + (i + 1) * dim);
      std::vector<double> rest = key;
      for (int d = 0; d < dim; ++d) rest[d] -= 4.0 * k8[i * dim + d];
      rho.push_back(norm_summary(key, dim));
      rho_e.push_back(norm_summary(rest, dim));
      const float least = round_up(0x1p-6 / std::sqrt(static_cast<double>(dim)) * (1 + 0x1p-50));
      if (rho.back() > 0) rho.back() = std::max(rho.back(), least);
      score.push_back(reference_score(ReferenceScorer::cpu, q_bytes, w,
                                      {k_bytes.data() + i * dim, static_cast<std::size_t>(dim)}, 1.0F));
    }
    for (int i = 0; i < keys; i += 2) focus.push_back(i);
  }

  [[nodiscard]] QueryHeads query() const { return {heads, dim, q, w, gram, gram_error}; }
  [[nodiscard]] PanelDots panel() const { return {keys, keys, x.data(), focus, rho}; }
  [[nodiscard]] std::span<const float> key(int i) const { return {&k[i * dim], static_cast<std::size_t>(dim)}; }
  [[nodiscard]] std::span<const std::int8_t> key8(int i) const { return {&k8[i * dim], static_cast<std::size_t>(dim)}; }

  // sum |w_h| ||q_h|| and sum |w_h| [x_h]+
  [[nodiscard]] double size() const {
    double sum = 0;
    for (int h = 0; h < heads; ++h)
      sum += std::abs(static_cast<double>(w[h])) * std::sqrt(static_cast<double>(gram[h * heads + h]));
    return sum;
  }
  [[nodiscard]] double mass(int i) const {
    double sum = 0;
    for (int h = 0; h < heads; ++h) sum += std::abs(static_cast<double>(w[h])) * relu(x[h * keys + i]);
    return sum;
  }
};

struct Built {
  Certificate certificate;
  std::vector<float> aux, rows;
  IntegerCertificate integer;
  std::vector<std::int8_t> integer_rows;

  Built(const Sample& s, const CertificateChoice& choice, const Allowances& allowances = {})
      : aux(kMaxAggregates * kMaxDim), integer_rows(kMaxBoundRows * kMaxDim) {
    certificate = build_certificate(s.query(), choice, s.panel(), aux, allowances);
    if (certificate.exempt) return;
    for (int j = 0; j < certificate.retained; ++j) {
      const float* row = &s.q[certificate.head[j] * s.dim];
      rows.insert(rows.end(), row, row + s.dim);
    }
    rows.insert(rows.end(), aux.begin(), aux.begin() + (certificate.rows - certificate.retained) * s.dim);
    integer = make_integer(certificate, s.query(), aux, integer_rows, allowances);
  }

  [[nodiscard]] float bound(const Sample& s, int i) const {
    return bound_reference(certificate, rows, s.key(i), s.rho[i]);
  }
  [[nodiscard]] float integer_bound(const Sample& s, int i) const {
    return bound_reference(integer, integer_rows, s.key8(i), s.rho[i], s.rho_e[i]);
  }
};

const std::vector<Form> kForms{Form::base, Form::absolute, Form::extended};

// The property. Returns the number of keys compared.
int expect_bounded(const Sample& s) {
  int compared = 0;
  for (const Form form : kForms) {
    for (const int retained : {0, 1, 2, 5, 14, 30, s.heads}) {
      for (const int aggregates : form == Form::base ? std::vector{0, 1, 2, 4} : std::vector{1}) {
        const Built built(s, {form, retained, aggregates});
        const Certificate& c = built.certificate;
        if (c.exempt) {
          EXPECT_EQ(form, Form::absolute) << "only a row that would omit a positive head lacks the absolute form";
          continue;
        }
        EXPECT_LE(c.rows, std::min(std::max(retained, 0), s.heads) + kMaxAggregates);
        for (int i = 0; i < s.keys; ++i, ++compared) {
          const auto where = [&] {
            return ::testing::Message() << "heads " << s.heads << " dim " << s.dim << " form " << static_cast<int>(form)
                                        << " retained " << retained << " aggregates " << aggregates << " key " << i;
          };
          EXPECT_GE(built.bound(s, i), s.score[i]) << where();
          if (!built.integer.exempt) {
            EXPECT_GE(built.integer_bound(s, i), s.score[i]) << "integers, " << where();
          }
          for (const float alpha : {0.0F, 0x1p-140F, 0.37F, 0x1p100F}) {
            EXPECT_GE(alpha * built.bound(s, i), alpha * s.score[i]) << where();
          }
          if (::testing::Test::HasFailure()) return compared;
        }
      }
    }
  }
  return compared;
}

// -------------------------------------------------------------------------------------------------------------
// families

enum class Heads { gaussian, bytes, parallel, few_components };
enum class Weights { mixed, positive, negative, sparse, one_huge, zero };

Bytes random_row(Random& random, int dim, Heads kind, const std::vector<float>& common) {
  std::normal_distribution<float> normal;
  std::vector<float> row(dim);
  Bytes out(dim);
  switch (kind) {
    case Heads::gaussian:
      for (int d = 0; d < dim; ++d) row[d] = normal(random) + 0.3F * common[d];
      quantize_row(row, out, ScaleRule::amax);
      break;
    case Heads::bytes:  // the whole range, subnormals and all
      for (auto& b : out) {
        do b = static_cast<std::uint8_t>(random());
        while (is_nan_e4m3(b));
      }
      break;
    case Heads::parallel:
      for (int d = 0; d < dim; ++d) row[d] = common[d] + 0.05F * normal(random);
      quantize_row(row, out, ScaleRule::amax);
      break;
    case Heads::few_components:
      out[random() % dim] = static_cast<std::uint8_t>(random() % 0x7F);
      out[random() % dim] = static_cast<std::uint8_t>(random() % 0x7F | 0x80);
      break;
  }
  return out;
}

Sample random_sample(std::uint64_t seed, int heads, int dim, Heads kind, Weights weights, float scale) {
  Random random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> common(dim);
  for (float& c : common) c = normal(random);
  Bytes q, k;
  for (int h = 0; h < heads; ++h) {
    const Bytes row = random_row(random, dim, kind, common);
    q.insert(q.end(), row.begin(), row.end());
  }
  std::vector<float> w(heads);
  for (int h = 0; h < heads; ++h) {
    const float size = scale * (0.05F + std::abs(normal(random)));
    switch (weights) {
      case Weights::mixed: w[h] = random() % 3 == 0 ? size : -size; break;
      case Weights::positive: w[h] = size; break;
      case Weights::negative: w[h] = -size; break;
      case Weights::sparse: w[h] = random() % 2 == 0 ? 0.0F : (random() % 2 == 0 ? size : -size); break;
      case Weights::one_huge: w[h] = h == heads / 2 ? 0x1p20F * size : (random() % 2 == 0 ? size : -size); break;
      case Weights::zero: w[h] = h % 2 == 0 ? 0.0F : -0.0F; break;
    }
  }
  // Keys: like the heads, equal to a head or its opposite, the joint direction of all heads, zero, one subnormal
  // component, all components at the largest value.
  const auto append = [&](const Bytes& row) { k.insert(k.end(), row.begin(), row.end()); };
  for (int i = 0; i < 6; ++i) append(random_row(random, dim, kind, common));
  for (int i = 0; i < 2; ++i) append(random_row(random, dim, Heads::bytes, common));
  for (int i = 0; i < 3; ++i) {
    Bytes row(q.begin() + static_cast<int>(random() % heads) * dim, q.end());
    row.resize(dim);
    append(row);
    for (auto& b : row) b ^= 0x80;
    append(row);
  }
  std::vector<float> joint(dim);
  for (int h = 0; h < heads; ++h) {
    for (int d = 0; d < dim; ++d) joint[d] += w[h] / scale * kE4m3Table[q[h * dim + d]];
  }
  Bytes row(dim);
  quantize_row(joint, row, ScaleRule::amax);
  append(row);
  for (auto& b : row) b ^= 0x80;
  append(row);
  append(Bytes(dim, 0x00));
  append(Bytes(dim, 0x7E));
  Bytes tiny(dim, 0x80);
  tiny[random() % dim] = 0x01;
  append(tiny);
  tiny[random() % dim] = 0x81;
  append(tiny);
  return {std::move(q), std::move(w), std::move(k), dim};
}

constexpr Heads kHeadKinds[] = {Heads::gaussian, Heads::bytes, Heads::parallel, Heads::few_components};
constexpr Weights kWeightKinds[] = {Weights::mixed,  Weights::positive, Weights::negative,
                                    Weights::sparse, Weights::one_huge, Weights::zero};
constexpr float kScales[] = {1.0F, 0x1p-12F, 0x1p-126F, 0x1p-146F, 0x1p28F};

// -----------------------------------------------------------------------------------------------------------------
// bound

TEST(Certificate, NeverBelowTheReferenceScore) {
  std::uint64_t seed = 1;
  for (const int heads : {1, 2, 3, 8, 31, 32, 33, 64, 128}) {
    for (const int dim : {32, 64, 128}) {
      for (const Weights weights : kWeightKinds) {
        const Heads kind = kHeadKinds[seed % std::size(kHeadKinds)];
        const float scale = kScales[seed % std::size(kScales)];
        ++seed;
        expect_bounded(random_sample(seed, heads, dim, kind, weights, scale));
        if (HasFailure()) return;
      }
    }
  }
}

RC_GTEST_PROP(CertificateProperty, NeverBelowTheReferenceScore, ()) {
  const int heads = *rc::gen::inRange(1, 41);
  const int dim = *rc::gen::element(32, 64, 128);
  const auto kind = *rc::gen::elementOf(std::vector<Heads>(std::begin(kHeadKinds), std::end(kHeadKinds)));
  const auto weights = *rc::gen::elementOf(std::vector<Weights>(std::begin(kWeightKinds), std::end(kWeightKinds)));
  const auto exponent = *rc::gen::inRange(-149, 40);
  const auto seed = *rc::gen::arbitrary<std::uint64_t>();
  const Sample s = random_sample(seed, heads, dim, kind, weights, std::ldexp(1.0F, exponent));
  const CertificateChoice choice{*rc::gen::element(Form::base, Form::absolute, Form::extended),
                                 *rc::gen::inRange(0, heads + 2), *rc::gen::inRange(0, 5),
                                 *rc::gen::element(Ablation::none, Ablation::no_aggregate, Ablation::all_aggregated, Ablation::no_projection)};
  const Built built(s, choice);
  RC_PRE(!built.certificate.exempt);
  for (int i = 0; i < s.keys; ++i) {
    RC_ASSERT(built.bound(s, i) >= s.score[i]);
    if (!built.integer.exempt) RC_ASSERT(built.integer_bound(s, i) >= s.score[i]);
  }
}

TEST(Certificate, WeightsNearTheLimitsOfF32) {
  // 2^50 with small heads is legal; a row whose sum of |w| ||q|| exceeds 2^60 has no certificate.
  Sample s = random_sample(7, 8, 128, Heads::few_components, Weights::mixed, 0x1p45F);
  expect_bounded(s);
  for (float& w : s.w) w = std::copysign(0x1p100F, w);
  EXPECT_TRUE(Built(s, {Form::extended, 4, 1}).certificate.exempt);
}

// -------------------------------------------------------------------------------------------------------------
// tightness

TEST(Certificate, WithEveryHeadRetainedOnlyRoundingRemains) {
  for (const int heads : {1, 3, 8, 32, 33, 60}) {
    for (const Form form : kForms) {
      const Sample s = random_sample(100 + heads, heads, 128, Heads::gaussian, Weights::mixed, 1.0F);
      const Built built(s, {form, heads, 1});
      ASSERT_FALSE(built.certificate.exempt);
      EXPECT_EQ(built.certificate.retained, heads);
      EXPECT_EQ(built.certificate.rows, heads);
      for (int i = 0; i < s.keys; ++i) {
        // Weights: g for the reference, g' for the screen, one rounding up; then both chains may err by as much again.
        const double relative = 2 * gamma_n(heads) + 2 * gamma_n(heads + 1) + 0x1p-23;
        const double norm = static_cast<double>(s.rho[i]) * std::sqrt(s.dim);
        const double excess = static_cast<double>(built.bound(s, i)) - s.score[i];
        EXPECT_LE(excess, relative * 1.01 * s.mass(i) + 0x1p-42 * s.size() * norm + 0x1p-120) << heads << " key " << i;
      }
    }
  }
}

TEST(Certificate, AllowancesOfOmittedHeadsAreAsDerived) {
  // Small integers: the gram matrix is exact in f32, so that its allowance is that of the f64 arithmetic alone.
  Random random(5);
  for (const int heads : {8, 32, 64}) {
    Bytes q(heads * 128), k(128, 0x38);
    for (auto& b : q) b = encode_e4m3(static_cast<float>(static_cast<int>(random() % 9) - 4));
    std::vector<float> w(heads);
    for (float& v : w) v = static_cast<float>(static_cast<int>(random() % 64) - 32) / 64;
    Sample s(q, w, k, 128);
    s.gram_error = 0;
    for (const Form form : {Form::base, Form::extended}) {
      for (const int retained : {0, 2, 4}) {
        const double with = Built(s, {form, retained, 1}).certificate.c;
        const double without = Built(s, {form, retained, 1}, Allowances{0}).certificate.c;
        // Dots of omitted heads, of anchors and of the auxiliary row; the reference's and the screen's chains on E;
        // f64.
        const double limit = (2 * gamma_n(127) + gamma_n(128)) + gamma_n(heads) + 3 * gamma_n(retained + 2) + 0x1p-18;
        EXPECT_GE(with, without);
        EXPECT_LE(with - without, 1.5 * limit * s.size() * std::sqrt(128.0)) << heads << " " << retained;
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------- constants, term by
// term

// certificate.md once more, from explicit vectors in f64 instead of the gram matrix: every allowance must be there, and
// nothing else. Random data seldom comes near the worst case of a rounding, so a missing term would go unseen
// elsewhere.
struct Expected {
  std::vector<double> weight;  // before rounding up
  double c = 0, tolerance = 0;
  double integer_c = 0, integer_c_e = 0;

  using Vector = std::vector<double>;

  static double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
    return sum;
  }
  static void add(Vector& to, double factor, const Vector& from) {
    for (std::size_t d = 0; d < to.size(); ++d) to[d] += factor * from[d];
  }
  static double gamma(int n) { return n * 0x1p-24 / (1 - n * 0x1p-24); }

  // (3) and (4): half = 1/2 sum u + z.
  static double absolute_root(const std::vector<Vector>& u) {
    double sum = 0;
    for (const Vector& a : u) {
      for (const Vector& b : u) sum += std::abs(dot(a, b));
    }
    return std::sqrt(sum);
  }

  Expected(const Sample& s, const Built& built, double gram_error) {
    const Certificate& c_ = built.certificate;
    const bool linear = c_.form != Form::base;
    const auto norm = [](const Vector& v) { return std::sqrt(dot(v, v)); };
    std::vector<Vector> q(s.heads);
    int active = 0;
    std::vector<bool> retained(s.heads, false);
    for (int h = 0; h < s.heads; ++h) {
      q[h].assign(s.q.begin() + h * s.dim, s.q.begin() + (h + 1) * s.dim);
      active += s.w[h] != 0.0F ? 1 : 0;
    }
    std::vector<double> v(s.heads, 0.0);
    const double g = gamma(active), e = gamma(s.dim - 1);
    for (int j = 0; j < c_.retained; ++j) {
      const int h = c_.head[j];
      retained[h] = true;
      v[h] = s.w[h] * (s.w[h] > 0 ? 1 + g : 1 - g);
    }
    std::vector<Vector> u;
    Vector half(s.dim, 0.0), aux(s.dim, 0.0);
    double total = 0, lost_dots = 0, leaned = 0;
    for (int h = 0; h < s.heads; ++h) {
      total += std::abs(static_cast<double>(s.w[h])) * norm(q[h]);
      if (retained[h] || s.w[h] == 0.0F) continue;
      if (s.w[h] > 0) {
        int anchor = -1;
        double best = 0;
        for (int j = 0; j < c_.retained; ++j) {
          const double share = dot(q[h], q[c_.head[j]]) / norm(q[c_.head[j]]);
          if ((linear ? std::abs(share) : share) > best) best = linear ? std::abs(share) : share, anchor = c_.head[j];
        }
        const double w = s.w[h] * (1 + g);
        const double beta = anchor < 0 ? 0 : dot(q[h], q[anchor]) / dot(q[anchor], q[anchor]);
        Vector d = q[h];
        lost_dots += w * e * norm(q[h]);
        leaned += w * norm(q[h]);
        add(aux, -0.5 * w, q[h]);
        if (anchor >= 0) {
          add(d, -beta, q[anchor]);
          add(aux, 0.5 * w * std::abs(beta), q[anchor]);
          v[anchor] += w * std::abs(beta);
          lost_dots += w * std::abs(beta) * e * norm(q[anchor]);
          leaned += w * std::abs(beta) * norm(q[anchor]);
        }
        for (double& x : d) x *= w;
        u.push_back(d);
        add(half, 0.5, d);
      }
    }
    if (!linear) aux.assign(s.dim, 0.0);
    for (int h = 0; h < s.heads; ++h) {  // members of the aggregate are the certificate's choice
      if (retained[h] || s.w[h] >= 0 || c_.rows == c_.retained || c_.aux_share[0][h] == 0.0F) continue;
      const double w = -static_cast<double>(s.w[h]) * (1 - g);
      add(aux, w, q[h]);
      lost_dots += w * e * norm(q[h]);
    }
    const double gram = (gram_error + 0x1p-38) * leaned * leaned;
    const double root = absolute_root(u);
    const double signed_norm = 2 * norm(half);
    double constant = linear ? 0.5 * std::sqrt(root * root + gram)
                             : 0.5 * (std::sqrt(root * root + gram) + std::sqrt(signed_norm * signed_norm + gram));
    constant += lost_dots;
    Vector stored(s.dim, 0.0);
    if (c_.rows > c_.retained) {
      stored.assign(built.aux.begin(), built.aux.begin() + s.dim);
      Vector lost = aux;
      add(lost, -1, stored);
      constant += norm(lost) + norm(stored) * (gamma(s.dim) + (linear ? gamma(1) * (1 + gamma(s.dim)) : 0.0));
    }
    c = std::sqrt(static_cast<double>(s.dim)) * constant / (1 - gamma(c_.rows + 1));
    tolerance = 1e-9 * std::sqrt(static_cast<double>(s.dim)) * total;
    for (int j = 0; j < c_.retained; ++j) {
      const double value = v[c_.head[j]];
      weight.push_back(value >= 0 ? value / (1 - gamma(c_.rows - j)) : value / (1 + gamma(c_.rows - j)));
    }
    if (c_.rows > c_.retained) weight.push_back(linear ? -1.0 : -1 / (1 + gamma(1)));

    // Section 6.
    const IntegerCertificate& integer = built.integer;
    const int relu_rows = c_.rows - c_.linear_rows;
    std::vector<Vector> by_key, by_row;
    Vector half_key(s.dim, 0.0), half_row(s.dim, 0.0), rest = stored;
    double linear_size = 0, own_dots = 0, largest = 0;
    for (const double x : stored) largest = std::max(largest, std::abs(x));
    for (int j = 0; j < integer.rows; ++j) {
      Vector row(s.dim);
      for (int d = 0; d < s.dim; ++d) row[d] = built.integer_rows[j * s.dim + d];
      if (j >= relu_rows) {
        const double step = -static_cast<double>(integer.weight[j]) / 4;
        add(rest, -step, row);
        linear_size += step * norm(row);
        continue;
      }
      Vector y = j < c_.retained ? q[c_.head[j]] : stored;
      const double step = j < c_.retained ? 4 : static_cast<double>(static_cast<float>(largest / 127));
      Vector lost = y;
      add(lost, -step, row);
      for (int d = 0; d < s.dim; ++d) y[d] *= c_.weight[j], lost[d] *= c_.weight[j];
      by_key.push_back(y), by_row.push_back(lost);
      add(half_key, 0.5, y), add(half_row, 0.5, lost);
      if (j < c_.retained)
        own_dots += std::abs(static_cast<double>(s.w[c_.head[j]])) * (1 + gamma(s.heads)) * e * norm(q[c_.head[j]]);
    }
    if (linear && c_.rows > c_.retained) add(half_key, -1, stored), add(half_row, -1, rest);
    const double per_row = norm(half_row) + 0.5 * absolute_root(by_row) + gamma(integer.rows) * linear_size;
    const double per_key = norm(half_key) + 0.5 * absolute_root(by_key);
    const double unit = std::sqrt(static_cast<double>(s.dim)) / (1 - gamma(integer.rows + 2));
    integer_c = c_.c / (1 - gamma(integer.rows + 2)) + unit * (per_row + own_dots);
    integer_c_e = unit * (per_row + per_key);
  }
};

TEST(Certificate, EveryAllowanceIsThere) {
  for (const int heads : {3, 8, 32, 64}) {
    for (const double gram_error : {0.0, gamma_n(128)}) {
      // Small integers: the gram matrix is exact in f32, whatever error is declared.
      Random random(70 + heads);
      Bytes q(heads * 128), k(8 * 128);
      for (auto& b : q) b = encode_e4m3(static_cast<float>(static_cast<int>(random() % 25) - 12));
      for (auto& b : k) b = static_cast<std::uint8_t>(random() % 0x7F | (random() % 2) << 7);
      std::vector<float> w(heads);
      for (float& v : w) v = static_cast<float>(static_cast<int>(random() % 4096) - 2048) / 3000;
      Sample s(q, w, k, 128);
      s.gram_error = gram_error;
      for (const Form form : {Form::base, Form::extended}) {
        for (const int retained : {0, 1, 2, heads / 3, heads / 2}) {
          const Built built(s, {form, retained, 1});
          const Expected expected(s, built, gram_error);
          const Certificate& c = built.certificate;
          const auto where = ::testing::Message() << heads << " form " << static_cast<int>(form) << " r " << retained;
          // Norms are taken from a gram matrix that may be off by gram_error.
          const double wider = 2 * gram_error * gamma_n(128) * s.size() * std::sqrt(128.0);
          EXPECT_GE(c.c, expected.c - expected.tolerance) << where;
          EXPECT_LE(c.c, expected.c * (1 + 0x1p-22) + expected.tolerance + wider) << where;
          ASSERT_EQ(static_cast<std::size_t>(c.rows), expected.weight.size()) << where;
          for (int j = 0; j < c.rows; ++j) {
            EXPECT_GE(c.weight[j], expected.weight[j] - 1e-14 * std::abs(expected.weight[j])) << where;
            EXPECT_LE(c.weight[j], expected.weight[j] + 0x1p-22 * std::abs(expected.weight[j])) << where;
          }
          ASSERT_FALSE(built.integer.exempt);
          EXPECT_GE(built.integer.c, expected.integer_c - expected.tolerance) << where;
          EXPECT_LE(built.integer.c, expected.integer_c * (1 + 0x1p-22) + expected.tolerance) << where;
          EXPECT_GE(built.integer.c_e, expected.integer_c_e - expected.tolerance) << where;
          EXPECT_LE(built.integer.c_e, expected.integer_c_e * (1 + 0x1p-22) + expected.tolerance) << where;
          for (int j = 0; j < c.retained; ++j) {
            const double value = 16.0 * c.weight[j];
            const double loss = gamma_n(built.integer.rows - j);
            const double exact = value >= 0 ? value / (1 - loss) : value / (1 + loss);
            EXPECT_GE(built.integer.weight[j], exact - 1e-14 * std::abs(exact));
            EXPECT_LE(built.integer.weight[j], exact + 0x1p-22 * std::abs(exact));
          }
        }
      }
    }
  }
}

// The reference keeps s unchanged while 127 omitted negative heads take away less than half an ulp each.
TEST(Certificate, TheReferenceMayIgnoreManySmallHeads) {
  const int heads = 128, dim = 128;
  Bytes q(heads * dim, 0x00), k(dim, 0x00);
  for (int h = 0; h < heads; ++h) q[h * dim] = 0x38;
  k[0] = 0x38;
  std::vector<float> w(heads, -0x1.8p-26F);  // half an ulp of 1 - 2^-24 is 2^-25
  w[0] = std::nextafterf(1.0F, 0.0F);
  const Sample s(q, w, k, dim);
  EXPECT_EQ(s.score[0], w[0]);
  const Built sound(s, {Form::absolute, 1, 1});
  EXPECT_GE(sound.bound(s, 0), s.score[0]);
  EXPECT_LT(Built(s, {Form::absolute, 1, 1}, Allowances{0}).bound(s, 0), s.score[0]);
}

// --------------------------------------------------------------------------------------------------------------
// mutation

// With every omitted negative head on, the linear form equals the score but for rounding, which goes either way.
Sample all_on_sample(std::uint64_t seed) {
  Random random(seed);
  const int heads = 16, dim = 128, keys = 64;
  Bytes q(heads * dim), k(keys * dim);
  for (auto& b : q) b = static_cast<std::uint8_t>(0x20 + random() % 0x5E);  // positive components
  for (auto& b : k) b = static_cast<std::uint8_t>(0x20 + random() % 0x5E);
  std::vector<float> w(heads);
  for (int h = 0; h < heads; ++h) w[h] = (h < 4 ? 3.0F : -1.0F) * (0.5F + static_cast<float>(random() % 1000) / 1000);
  return {q, w, k, dim};
}

TEST(CertificateMutation, WithoutAllowancesTheBoundFails) {
  const Sample s = all_on_sample(11);
  for (const Form form : kForms) {
    int below = 0, integer_below = 0;
    const Built sound(s, {form, 4, 1}), mutant(s, {form, 4, 1}, Allowances{0});
    for (int i = 0; i < s.keys; ++i) {
      EXPECT_GE(sound.bound(s, i), s.score[i]);
      EXPECT_GE(sound.integer_bound(s, i), s.score[i]);
      below += mutant.bound(s, i) < s.score[i] ? 1 : 0;
      integer_below += mutant.integer_bound(s, i) < s.score[i] ? 1 : 0;
    }
    EXPECT_GT(below, 0) << "form " << static_cast<int>(form);
    EXPECT_GT(integer_below, 0) << "form " << static_cast<int>(form);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// forms

TEST(Certificate, AbsoluteFormIsTheExtendedFormWithNoPositiveHeadOmitted) {
  const Sample s = random_sample(3, 24, 128, Heads::gaussian, Weights::mixed, 1.0F);
  int positives = 0;
  for (const float w : s.w) positives += w > 0 ? 1 : 0;
  const Built absolute(s, {Form::absolute, 23, 1}), extended(s, {Form::extended, 23, 1});
  ASSERT_FALSE(absolute.certificate.exempt);
  EXPECT_EQ(absolute.certificate.linear_rows, 1);
  if (absolute.certificate.head == extended.certificate.head) {
    EXPECT_EQ(absolute.certificate.weight, extended.certificate.weight);
    EXPECT_EQ(absolute.certificate.c, extended.certificate.c);
    EXPECT_EQ(absolute.rows, extended.rows);
  }
  EXPECT_TRUE(Built(s, {Form::absolute, positives - 1, 1}).certificate.exempt);
  EXPECT_FALSE(Built(s, {Form::absolute, positives, 1}).certificate.exempt);
}

TEST(Certificate, NothingToBoundGivesZero) {
  const Sample s = random_sample(4, 8, 64, Heads::gaussian, Weights::zero, 1.0F);
  for (const Form form : kForms) {
    const Built built(s, {form, 4, 1});
    EXPECT_EQ(built.certificate.rows, 0);
    for (int i = 0; i < s.keys; ++i) EXPECT_EQ(built.bound(s, i), 0.0F);
  }
}

TEST(Certificate, HeadsThatCannotContributeDropOut) {
  const Sample s = random_sample(4, 8, 64, Heads::gaussian, Weights::positive, 1.0F);
  Bytes q = s.q_bytes;
  std::fill_n(q.begin() + 2 * 64, 64, std::uint8_t{0x80});  // head 2 is zero, of any weight
  std::vector<float> w = s.w;
  w[2] = 3e38F;
  w[5] = -0.0F;
  const Sample t(q, w, s.k_bytes, 64);
  const Built built(t, {Form::extended, 8, 1});
  ASSERT_FALSE(built.certificate.exempt);
  EXPECT_EQ(built.certificate.retained, 6);
  for (int j = 0; j < 6; ++j) EXPECT_TRUE(built.certificate.head[j] != 2 && built.certificate.head[j] != 5);
  expect_bounded(t);
}

TEST(Certificate, NonFiniteRowsAreExempt) {
  const Sample s = random_sample(4, 8, 64, Heads::gaussian, Weights::mixed, 1.0F);
  for (const float bad : {kInf, -kInf, kNaN}) {
    Sample t = s;
    t.w[3] = bad;
    EXPECT_TRUE(Built(t, {Form::extended, 4, 1}).certificate.exempt);
  }
  Bytes q = s.q_bytes;
  q[5] = kE4m3NaN;
  std::vector<float> w = s.w;
  w[0] = 0;  // even in a head of zero weight
  EXPECT_TRUE(Built(Sample(q, w, s.k_bytes, 64), {Form::extended, 4, 1}).certificate.exempt);
}

TEST(Certificate, StatisticsAreAdviceOnly) {
  Sample s = random_sample(9, 33, 128, Heads::gaussian, Weights::mixed, 1.0F);
  s.focus.clear();
  expect_bounded(s);
  s.focus.assign(s.keys, 3);  // NaN dots and repeated keys must not matter either
  for (int h = 0; h < s.heads; ++h) s.x[h * s.keys + 3] = kNaN;
  expect_bounded(s);
  s.rho[3] = kInf;
  const Built built(s, {Form::extended, 6, 1});
  EXPECT_FALSE(built.certificate.exempt);
}

TEST(HeadRanking, IsAnOrderOfTheActiveHeads) {
  for (const int heads : {1, 2, 8, 33, 128}) {
    for (const Weights weights : kWeightKinds) {
      const Sample s = random_sample(20 + heads, heads, 64, Heads::gaussian, weights, 0x1p-100F);
      PanelDots panel = s.panel();
      for (int without = 0; without < 3; ++without) {
        if (without == 1) panel.rho = {};
        if (without == 2) panel.focus = {};
        HeadRanking ranking = rank_heads(s.query(), panel);
        const auto active = std::count_if(s.w.begin(), s.w.end(), [](float w) { return w != 0.0F; });
        ASSERT_EQ(ranking.count, active);
        std::sort(ranking.order.begin(), ranking.order.begin() + ranking.count);
        EXPECT_EQ(std::adjacent_find(ranking.order.begin(), ranking.order.begin() + ranking.count),
                  ranking.order.begin() + ranking.count);
        for (int i = 0; i < ranking.count; ++i) EXPECT_NE(s.w[ranking.order[i]], 0.0F);
      }
    }
  }
}

TEST(HeadRanking, OfAnotherQueryIsValidToo) {
  const Sample s = random_sample(30, 32, 128, Heads::gaussian, Weights::sparse, 1.0F);
  const Sample other = random_sample(31, 32, 128, Heads::gaussian, Weights::sparse, 1.0F);
  const HeadRanking ranking = rank_heads(other.query(), other.panel());
  std::vector<float> aux(kMaxAggregates * kMaxDim), rows;
  const Certificate c = build_certificate(s.query(), ranking, {Form::extended, 6, 1}, s.panel(), aux);
  for (int j = 0; j < c.retained; ++j) rows.insert(rows.end(), &s.q[c.head[j] * 128], &s.q[c.head[j] * 128] + 128);
  rows.insert(rows.end(), aux.begin(), aux.begin() + (c.rows - c.retained) * 128);
  for (int i = 0; i < s.keys; ++i) EXPECT_GE(bound_reference(c, rows, s.key(i), s.rho[i]), s.score[i]);
}

// ------------------------------------------------------------------------------------------------------------
// prediction

TEST(PredictBounds, IsTheBoundWithoutItsRounding) {
  for (const int heads : {3, 32, 128}) {
    const Sample s = random_sample(40 + heads, heads, 128, Heads::gaussian, Weights::mixed, 1.0F);
    for (const Form form : kForms) {
      const Built built(s, {form, 5, 2});
      if (built.certificate.exempt) continue;
      std::vector<float> u(s.keys), u8(s.keys);
      predict_bounds(built.certificate, s.panel(), s.rho, u);
      predict_bounds(built.certificate, built.integer, s.panel(), s.rho, s.rho_e, u8);
      for (int i = 0; i < s.keys; ++i) {
        const double size = s.size() * s.rho[i] * std::sqrt(s.dim);
        EXPECT_NEAR(u[i], built.bound(s, i), 1e-4 * size);
        EXPECT_NEAR(u8[i], built.integer_bound(s, i), 0.02 * size);
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------------------
// integers

TEST(IntegerScreen, QuartersOfE4m3) {
  EXPECT_EQ(quarter_e4m3(0x00), 0);
  EXPECT_EQ(quarter_e4m3(encode_e4m3(2.0F)), 0);  // 0.5 to even
  EXPECT_EQ(quarter_e4m3(encode_e4m3(6.0F)), 2);  // 1.5 to even
  EXPECT_EQ(quarter_e4m3(encode_e4m3(-6.0F)), -2);
  EXPECT_EQ(quarter_e4m3(encode_e4m3(2.25F)), 1);
  EXPECT_EQ(quarter_e4m3(encode_e4m3(-448.0F)), -112);
  for (int byte = 0; byte < 0x7F; ++byte) {
    const auto b = static_cast<std::uint8_t>(byte);
    if (decode_e4m3(b) >= 32.0F) {
      EXPECT_EQ(4.0F * quarter_e4m3(b), decode_e4m3(b));
    }
    EXPECT_LE(std::abs(4.0F * quarter_e4m3(b) - decode_e4m3(b)), 2.0F);
  }
}

TEST(IntegerScreen, ExactHeadsAndKeysLeaveOnlyRounding) {
  // Multiples of 4 throughout and every head retained: the integer bound loses what the f32 one loses plus the dots'
  // error.
  Random random(6);
  Bytes q(8 * 128), k(16 * 128);
  for (auto& b : q) b = encode_e4m3(4.0F * static_cast<float>(static_cast<int>(random() % 17) - 8));
  for (auto& b : k) b = encode_e4m3(4.0F * static_cast<float>(static_cast<int>(random() % 17) - 8));
  std::vector<float> w(8);
  for (float& v : w) v = static_cast<float>(static_cast<int>(random() % 64) - 32) / 64;
  const Sample s(q, w, k, 128);
  const Built built(s, {Form::extended, 8, 1});
  ASSERT_FALSE(built.integer.exempt);
  for (int i = 0; i < s.keys; ++i) {
    EXPECT_EQ(s.rho_e[i], 0.0F);
    const double norm = static_cast<double>(s.rho[i]) * std::sqrt(s.dim);
    const double limit = 6 * gamma_n(10) * s.mass(i) + (gamma_n(127) + gamma_n(128)) * s.size() * norm;
    EXPECT_LE(static_cast<double>(built.integer_bound(s, i)) - s.score[i], limit);
  }
}

TEST(IntegerScreen, HasTheRowsOfTheCertificate) {
  const Sample s = random_sample(50, 32, 128, Heads::gaussian, Weights::mixed, 1.0F);
  for (const Form form : kForms) {
    const Built built(s, {form, form == Form::absolute ? 31 : 6, 2});
    ASSERT_FALSE(built.integer.exempt);
    EXPECT_EQ(built.integer.rows, built.certificate.rows);
    EXPECT_EQ(built.integer.linear_rows, built.certificate.linear_rows);
  }
}

// -----------------------------------------------------------------------------------------------------------------
// slack

TEST(Slack, PartsAddUpAndAreNotNegative) {
  for (const int heads : {2, 8, 32, 64}) {
    const Sample s = random_sample(60 + heads, heads, 128, Heads::gaussian, Weights::mixed, 1.0F);
    for (const Form form : kForms) {
      for (const int retained : {0, 2, 6, heads}) {
        for (const int aggregates : {0, 1, 3}) {
          const Built built(s, {form, retained, aggregates}), plain(s, {form, retained, aggregates}, Allowances{0});
          if (built.certificate.exempt) continue;
          for (int i = 0; i < s.keys; ++i) {
            std::vector<float> dots(heads);
            for (int h = 0; h < heads; ++h) dots[h] = s.x[h * s.keys + i];
            const float u = built.bound(s, i);
            const Slack slack = decompose_slack(plain.certificate, s.query(), dots, s.rho[i], u);
            double score = 0;
            for (int h = 0; h < heads; ++h) score += static_cast<double>(s.w[h]) * relu(dots[h]);
            const double size = s.size() * s.rho[i] * std::sqrt(s.dim);
            EXPECT_NEAR(slack.total(), u - score, 1e-12 * size);
            EXPECT_GE(slack.projection, -1e-5 * size);
            EXPECT_GE(slack.left_out, 0);
            EXPECT_GE(slack.aggregate, -1e-12 * size);
            EXPECT_LE(std::abs(slack.allowances), 5e-3 * size);
          }
        }
      }
    }
  }
}

TEST(Slack, OfOneKeyByHand) {
  // Heads e0 (+2, retained), e1 (-1), e2 (-1), e3 (+1): one key with dots 8, 4, -2, 1.
  const int dim = 32;
  Bytes q(4 * dim), k(dim);
  for (int h = 0; h < 4; ++h) q[h * dim + h] = 0x38;
  k[0] = encode_e4m3(8), k[1] = encode_e4m3(4), k[2] = encode_e4m3(-2), k[3] = encode_e4m3(1);
  const Sample s(q, {2, -1, -1, 1}, k, dim);
  std::vector<float> dots{8, 4, -2, 1};
  const double norm = std::sqrt(64.0 + 16 + 4 + 1);
  // Without statistics the base form aggregates both negative heads: min(4, 2); e3 has no anchor: E = ||q_3|| = 1.
  {
    Sample t = s;
    t.focus.clear();
    const Built plain(t, {Form::base, 1, 1}, Allowances{0});
    const Slack slack = decompose_slack(plain.certificate, t.query(), dots, t.rho[0], plain.bound(t, 0));
    EXPECT_NEAR(slack.aggregate, 2, 1e-6);
    EXPECT_NEAR(slack.left_out, 0, 1e-6);
    EXPECT_NEAR(slack.projection, norm - 1, 1e-4);
    EXPECT_NEAR(slack.total(), 2 * 8 - 2 + norm - (16 - 4 + 1), 1e-4);
  }
  // With the key itself as statistics the linear form keeps e3: omitting it would cost (||k|| - 1) / 2, omitting e0
  // only
  // ||k|| - 8, and the negative heads nothing, because e1 is on and joins the linear row while e2 is off.
  {
    const Built plain(s, {Form::extended, 1, 1}, Allowances{0});
    ASSERT_EQ(plain.certificate.head[0], 3);
    const Slack slack = decompose_slack(plain.certificate, s.query(), dots, s.rho[0], plain.bound(s, 0));
    EXPECT_NEAR(slack.aggregate, 0, 1e-6);
    EXPECT_NEAR(slack.left_out, 0, 1e-6);
    EXPECT_NEAR(slack.projection, norm - 8, 1e-4);
  }
}

}  // namespace
}  // namespace dosa
