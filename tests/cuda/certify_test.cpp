// Certificates made on the device, read back and evaluated in plain code as launch_screen defines them: no key may be
// rejected at a tau that its own reference score reaches.
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "backend/cuda/prepare.hpp"
#include "base/dtype.hpp"
#include "certificate/certificate.hpp"
#include "certificate/hopper_bound.hpp"
#include "cuda/guarded.hpp"
#include "io/trace.hpp"
#include "score/quantize.hpp"
#include "score/reference.hpp"
#include "score/sm90.hpp"

namespace dosa::test {
namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<std::uint8_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kDim = 128;

struct Data {
  std::int64_t nq = 0, nk = 0;
  int heads = 0;
  Bytes q, k;
  std::vector<float> k_scale, w;
};

std::span<const std::uint8_t> key(const Data& d, std::int64_t i) { return {d.k.data() + i * kDim, kDim}; }

float score(const Data& d, std::int64_t row, std::int64_t i) {
  const auto heads = static_cast<std::size_t>(d.heads);
  return reference_score(ReferenceScorer::sm90, {d.q.data() + row * d.heads * kDim, heads * kDim},
                         {d.w.data() + row * d.heads, heads}, key(d, i), d.k_scale[static_cast<std::size_t>(i)]);
}

float dot(const std::uint8_t* a, const std::uint8_t* b) { return sm90_dot(a, b, kDim); }

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

float to_bf16_and_back(float x) {  // x >= 0, finite; to nearest even
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFU + (bits >> 16 & 1U)) & 0xFFFF0000U);
}

// A data set on the device, and what the stages before the certificate make of it.
struct OnDevice {
  explicit OnDevice(const Data& d)
      : q(d.q),
        k(d.k),
        k_scale(d.k_scale),
        w(d.w),
        rho(d.k_scale.size()),
        inv_alpha(d.k_scale.size()),
        exempt(static_cast<std::size_t>(cuda::mask_words(d.nk))) {
    in.q = q.data();
    in.k = k.data();
    in.k_scale = k_scale.data();
    in.w = w.data();
    in.w_stride = d.heads;
    in.nq = d.nq;
    in.nk = d.nk;
    in.heads = d.heads;
    EXPECT_CUDA(cuda::launch_keys(
        {k.data(), k_scale.data(), d.nk, rho.data(), inv_alpha.data(), exempt.data(), nullptr}, nullptr));
  }
  GuardedArray<std::uint8_t> q, k;
  GuardedArray<float> k_scale, w, rho, inv_alpha;
  GuardedArray<std::uint32_t> exempt;
  cuda::Inputs in{};
};

struct Packed {
  int budget = 0;
  Bytes bound_rows;  // [nq][budget][128]
  std::vector<std::uint16_t> weight;
  std::vector<float> c, sigma, tau;
  Bytes screened;

  friend bool operator==(const Packed&, const Packed&) = default;
};

Packed certify(const Data& d, const OnDevice& device, const std::vector<float>& tau, int budget, bool base,
               float allowances) {
  const auto rows = static_cast<std::size_t>(d.nq);
  const auto width = static_cast<std::size_t>(budget);
  const GuardedArray<float> tau_in(tau);
  const GuardedArray<std::uint8_t> budgets(Bytes(rows, static_cast<std::uint8_t>(budget)));
  const GuardedArray<std::uint8_t> bound_rows(rows * width * kDim), screened(rows);
  const GuardedArray<std::uint16_t> weight(rows * (width - 2));
  const GuardedArray<float> c(rows), sigma(2 * rows), tau_out(rows);
  const cuda::CertifyArgs args{
      {device.in, 0, d.nq, device.rho.data(), device.inv_alpha.data(), tau_in.data(), base, allowances},
      budgets.data(),
      0,
      bound_rows.data(),
      budget * kDim,
      weight.data(),
      budget - 2,
      c.data(),
      sigma.data(),
      tau_out.data(),
      screened.data()};
  EXPECT_CUDA(cuda::launch_certify(args, nullptr));
  Packed out{budget,           bound_rows.download(), weight.download(),  c.download(),
             sigma.download(), tau_out.download(),    screened.download()};
  EXPECT_TRUE(bound_rows.guards_intact() && screened.guards_intact() && weight.guards_intact() && c.guards_intact() &&
              sigma.guards_intact() && tau_out.guards_intact());
  return out;
}

// The body that launch_screen takes the sign of, and how far rounding inside the tensor cores may move it.
struct Body {
  double value = 0;
  double uncertainty = 0;
};

Body body_of(const Packed& p, std::size_t row, const std::uint8_t* k, float rho, float inv_alpha, float lowered_tau) {
  const auto width = static_cast<std::size_t>(p.budget), kept = width - 2;
  const std::uint8_t* rows = p.bound_rows.data() + row * width * kDim;
  const float high = dot(rows + kept * kDim, k), low = dot(rows + (kept + 1) * kDim, k);
  float start = rho * p.c[row] - lowered_tau * inv_alpha;
  start -= p.sigma[2 * row] * high;
  start -= p.sigma[2 * row + 1] * low;
  Body out{start, std::abs(static_cast<double>(start))};
  for (std::size_t j = 0; j < kept; ++j) {
    const double weight = from_bf16(p.weight[row * kept + j]);
    const float x = dot(rows + j * kDim, k);
    const double term = weight * static_cast<double>(to_bf16_and_back(x > 0 ? x : 0.0F));
    out.value += term;
    out.uncertainty += std::abs(term);
  }
  // Steps of 16 products and the accumulator, each addend aligned no coarser than 2^-23 of the largest.
  out.uncertainty *= static_cast<double>(p.budget) / 2 * 17 * 0x1p-23;
  return out;
}

struct Verdict {
  std::int64_t pairs = 0;
  std::int64_t violations = 0;
};

// Every row against `keys` keys (spread evenly), tau at the key's own score.
Verdict examine(const Data& d, const OnDevice& device, const Packed& p, std::int64_t keys, float allowances) {
  const std::vector<float> rho = device.rho.download(), inv_alpha = device.inv_alpha.download();
  Verdict out;
  for (std::int64_t row = 0; row < d.nq; ++row) {
    if (p.screened[static_cast<std::size_t>(row)] == 0) continue;
    for (std::int64_t n = 0; n < keys; ++n) {
      const std::int64_t i = n * d.nk / keys;
      const auto at = static_cast<std::size_t>(i);
      if (inv_alpha[at] == 0) continue;
      const float s = score(d, row, i);
      const float lowered = hopper_tau(s, allowances);
      if (!std::isfinite(lowered)) continue;
      const Body body =
          body_of(p, static_cast<std::size_t>(row), d.k.data() + i * kDim, rho[at], inv_alpha[at], lowered);
      ++out.pairs;
      if (body.value < (allowances > 0 ? body.uncertainty : 0.0)) ++out.violations;
    }
  }
  return out;
}

// ------------------------------------------------------------------------------------------------------------------
// data

enum class Kind { gaussian, alike, bytes, cancelling, tiny, huge, sparse };
constexpr Kind kKinds[] = {Kind::gaussian, Kind::alike, Kind::bytes, Kind::cancelling,
                           Kind::tiny,     Kind::huge,  Kind::sparse};

void fill_row(Random& random, Kind kind, const std::vector<float>& common, std::uint8_t* out) {
  std::normal_distribution<float> normal;
  for (std::size_t d = 0; d < kDim; ++d) {
    float x = normal(random) * 100;
    switch (kind) {
      case Kind::gaussian: break;
      case Kind::alike: x = 90 * common[d] + 0.3F * x; break;
      case Kind::bytes:
        do out[d] = static_cast<std::uint8_t>(random());
        while (is_nan_e4m3(out[d]));
        continue;
      case Kind::cancelling:  // large products that cancel in pairs, small ones that truncation loses
        x = d % 4 == 0 ? 448.0F : d % 4 == 1 ? -448.0F : 0x1p-4F * static_cast<float>(1 + random() % 15);
        break;
      case Kind::tiny: x *= 0x1p-14F; break;
      case Kind::huge: x = random() % 2 == 0 ? 448.0F : 416.0F; break;
      case Kind::sparse: x = d % 32 == 3 ? 448.0F : 1.75F * std::ldexp(1.0F, -static_cast<int>(random() % 4)); break;
    }
    out[d] = encode_e4m3(x);
  }
}

Data make_data(Random& random, std::int64_t nq, std::int64_t nk, int heads, Kind queries, Kind keys, double positive) {
  Data d{nq, nk, heads, Bytes(static_cast<std::size_t>(nq * heads * kDim)), Bytes(static_cast<std::size_t>(nk * kDim)),
         {}, {}};
  std::normal_distribution<float> normal;
  std::vector<float> common(kDim);
  for (float& x : common) x = normal(random);
  for (std::int64_t i = 0; i < nq * heads; ++i) {
    fill_row(random, queries, common, d.q.data() + i * kDim);
    if (random() % 40 == 0) std::fill_n(d.q.data() + i * kDim, kDim, std::uint8_t{0});
    const bool up = std::uniform_real_distribution<double>(0, 1)(random) < positive;
    const float size = std::exp(normal(random)) * 0x1p-7F;
    d.w.push_back(random() % 30 == 0 ? 0.0F : up ? size : -size);
  }
  for (std::int64_t i = 0; i < nk; ++i) {
    fill_row(random, random() % 4 == 0 ? Kind::alike : keys, common, d.k.data() + i * kDim);
    d.k_scale.push_back(std::exp2(static_cast<float>(random() % 20) - 14));
    if (i % 50 == 0) std::fill_n(d.k.data() + i * kDim, kDim, std::uint8_t{0});
    if (i % 50 == 1) std::copy_n(d.q.data() + i % (nq * heads) * kDim, kDim, d.k.data() + i * kDim);  // along a head
    if (i % 50 == 2) d.k_scale.back() = 0x1p-40F;
    if (i % 50 == 3) d.k_scale.back() = 0x1p20F;
    if (i % 50 == 4) d.k[static_cast<std::size_t>(i * kDim) + 5] = 0x7F;
    if (i % 50 == 5) d.k_scale.back() = -1.0F;
  }
  return d;
}

class CudaCertify : public CudaTest {};

TEST_F(CudaCertify, BoundsHoldForEveryKey) {
  Random random(1);
  std::int64_t pairs = 0;
  for (int trial = 0; trial < 24; ++trial) {
    const int all_heads[] = {32, 64, 8, 40, 1, 33, 32, 64};
    const int heads = all_heads[trial % 8];
    const double shares[] = {0.3, 0.6, 0.0, 1.0, 0.1};
    const Data d = make_data(random, 5, 150, heads, kKinds[random() % 7], kKinds[random() % 7], shares[trial % 5]);
    const OnDevice device(d);
    const int budget = cuda::budget_at(static_cast<int>(random() % cuda::kBudgetCount));
    const Packed packed = certify(d, device, std::vector<float>(5, 0.5F), budget, trial % 3 == 0, 1);
    EXPECT_EQ(packed.screened, Bytes(5, static_cast<std::uint8_t>(budget))) << trial;
    EXPECT_EQ(packed.tau, std::vector<float>(5, hopper_tau(0.5F, 1)));
    const Verdict verdict = examine(d, device, packed, 150, 1);
    EXPECT_EQ(verdict.violations, 0) << "trial " << trial << " heads " << heads << " budget " << budget;
    pairs += verdict.pairs;
    EXPECT_EQ(certify(d, device, std::vector<float>(5, 0.5F), budget, trial % 3 == 0, 1), packed)
        << "not the same twice";
  }
  EXPECT_GT(pairs, 12000);
}

// Heads whose large products cancel: the tensor cores lose their small ones, all positive. In the aggregate of two
// kinds of heads the large components cancel instead, and its small products are kept. So the aggregate claims what the
// reference lost.
TEST_F(CudaCertify, BoundsFailWithoutTheAllowances) {
  constexpr std::uint8_t kOne = 0x38, kLarge = 0x7E, kMinusLarge = 0xFE;
  Data d{1, 64, 32, {}, {}, std::vector<float>(64, 1.0F), std::vector<float>(32, -1.0F)};
  for (int row = 0; row < 32 + 64; ++row) {
    for (int i = 0; i < kDim; ++i) {
      const bool minus = row < 32 && (i + row) % 2 == 1;
      (row < 32 ? d.q : d.k).push_back(i % 32 > 1 ? kOne : minus ? kMinusLarge : kLarge);
    }
  }
  const OnDevice device(d);
  EXPECT_EQ(score(d, 0, 0), 0.0F);
  EXPECT_EQ(examine(d, device, certify(d, device, {0.0F}, 8, false, 0), 64, 0).violations, 64);
  EXPECT_EQ(examine(d, device, certify(d, device, {0.0F}, 8, false, 1), 64, 1).violations, 0);
}

TEST_F(CudaCertify, RowsWithoutACertificate) {
  Random random(3);
  Data d = make_data(random, 8, 100, 32, Kind::gaussian, Kind::gaussian, 0.5);
  const auto width = static_cast<std::size_t>(d.heads);
  d.q[1 * width * kDim + 700] = 0xFF;
  d.w[2 * width + 3] = kInf;
  d.w[3 * width + 31] = kNaN;
  d.w[4 * width + 7] = 1e30F;
  std::vector<float> tau(8, 1.0F);
  tau[5] = -kInf;
  tau[6] = kNaN;
  tau[7] = kInf;
  const OnDevice device(d);
  EXPECT_EQ(certify(d, device, tau, 16, false, 1).screened, (Bytes{16, 0, 0, 0, 0, 0, 0, 16}));
}

TEST_F(CudaCertify, MoreHeadsThanRowsAreHandedOn) {
  Random random(4);
  const Data d = make_data(random, 3, 100, 128, Kind::gaussian, Kind::gaussian, 0.5);
  EXPECT_EQ(certify(d, OnDevice(d), {0, 0, 0}, 16, false, 1).screened, Bytes(3, 0));
}

// ------------------------------------------------------------------------------------------------------- real
// activations

// The last `nq` queries of a trace, whose keys they all see, and their taus.
struct Real {
  Data d;
  std::vector<float> tau;
  std::vector<std::vector<float>> scores;
};

Real load_real(const char* name, std::int64_t nq, std::int64_t stride_of_keys, double share) {
  Real out;
  const auto trace = Trace::open(std::string(DOSA_TRACES) + "/" + name + ".safetensors");
  if (!trace) {
    ADD_FAILURE() << trace.error().message;
    return out;
  }
  const Problem& p = trace->problem();
  Data& d = out.d;
  d.nq = nq;
  d.heads = static_cast<int>(p.q.shape[1]);
  for (std::int64_t r = p.q.shape[0] - nq; r < p.q.shape[0]; ++r) {
    const auto* q = p.q.at<std::uint8_t>(r);
    d.q.insert(d.q.end(), q, q + d.heads * kDim);
    const auto* w = p.w.at<float>(r);
    d.w.insert(d.w.end(), w, w + d.heads);
  }
  for (std::int64_t i = 0; i + nq < p.k.shape[0]; i += stride_of_keys) {
    const auto* k = p.k.at<std::uint8_t>(i);
    d.k.insert(d.k.end(), k, k + kDim);
    d.k_scale.push_back(*p.k_scale.at<float>(i));
  }
  d.nk = static_cast<std::int64_t>(d.k_scale.size());
  for (std::int64_t r = 0; r < nq; ++r) {
    std::vector<float> scores;
    for (std::int64_t i = 0; i < d.nk; ++i) scores.push_back(score(d, r, i));
    out.scores.push_back(scores);
    const auto rank = static_cast<std::ptrdiff_t>(share * static_cast<double>(d.nk));
    std::nth_element(scores.begin(), scores.begin() + rank, scores.end(), std::greater<>());
    out.tau.push_back(scores[static_cast<std::size_t>(rank)]);
  }
  return out;
}

TEST_F(CudaCertify, RealActivations) {
  struct Trial {
    const char* name;
    int budget;
    double most;  // survivors, share of keys; K / N is 0.03
  };
  for (const Trial& trial : {Trial{"demo-h32", 8, 0.16}, Trial{"demo-h32", 16, 0.055}, Trial{"demo-h64", 16, 0.25},
                             Trial{"demo-h64", 24, 0.1}}) {
    const Real real = load_real(trial.name, 6, 29, 0.03);
    const OnDevice device(real.d);
    const Packed packed = certify(real.d, device, real.tau, trial.budget, false, 1);
    EXPECT_EQ(packed.screened, Bytes(6, static_cast<std::uint8_t>(trial.budget)));
    const Verdict verdict = examine(real.d, device, packed, real.d.nk, 1);
    EXPECT_EQ(verdict.violations, 0);
    const std::vector<float> rho = device.rho.download(), inv_alpha = device.inv_alpha.download();
    std::int64_t survivors = 0;
    for (std::size_t r = 0; r < 6; ++r) {
      for (std::int64_t i = 0; i < real.d.nk; ++i) {
        const auto at = static_cast<std::size_t>(i);
        survivors +=
            body_of(packed, r, real.d.k.data() + i * kDim, rho[at], inv_alpha[at], packed.tau[r]).value < 0 ? 0 : 1;
      }
    }
    const double share = static_cast<double>(survivors) / static_cast<double>(6 * real.d.nk);
    EXPECT_LT(share, trial.most) << trial.name << " budget " << trial.budget;
    EXPECT_GE(share, 0.03);
    ::testing::Test::RecordProperty(std::string(trial.name) + "-" + std::to_string(trial.budget),
                                    std::to_string(share));
    std::printf("%s, %d rows: %.2f %% survive, %lld pairs hold\n", trial.name, trial.budget, 100 * share,
                static_cast<long long>(verdict.pairs));
  }
}

// ------------------------------------------------------------------------------------------------------------------
// plan

TEST_F(CudaCertify, PlanTakesTheCheapestBudget) {
  const Real real = load_real("demo-h32", 64, 67, 0.03);
  const OnDevice device(real.d);
  const GuardedArray<float> tau(real.tau);
  constexpr std::int64_t rows = 64, stride = cuda::kPanelRows, samples = rows / stride;
  const GuardedArray<std::int32_t> survivors(samples * cuda::kBudgetCount), sampled(samples);
  const cuda::CertifyInputs inputs{device.in,  0,     rows, device.rho.data(), device.inv_alpha.data(),
                                   tau.data(), false, 1};
  ASSERT_CUDA(cuda::launch_predict({inputs, stride / 2, stride, survivors.data(), sampled.data()}, nullptr));
  const std::vector<std::int32_t> counts = survivors.download();
  EXPECT_EQ(sampled.download(), std::vector<std::int32_t>(samples, 128));
  for (std::size_t s = 0; s < samples; ++s) {
    for (std::size_t b = 0; b < cuda::kBudgetCount; ++b) {
      EXPECT_GE(counts[s * cuda::kBudgetCount + b], 1);
      EXPECT_LE(counts[s * cuda::kBudgetCount + b], b >= 3 ? 12 : 40) << "sample " << s << " budget " << b;
    }
  }
  for (const double survivor : {0.0, 1.0, 30.0, 1e6}) {
    const GuardedArray<std::uint8_t> budget(rows);
    const double row = 0.024, fixed = 0.01;
    ASSERT_CUDA(cuda::launch_choose(
        {rows, rows, stride, survivors.data(), sampled.data(), row, survivor, fixed, 0.9, budget.data()}, nullptr));
    double best = 0.9;
    int want = 0;
    for (int b = 0; b < cuda::kBudgetCount; ++b) {
      int sum = 0;
      for (std::size_t s = 0; s < samples; ++s) sum += counts[s * cuda::kBudgetCount + static_cast<std::size_t>(b)];
      const double work = cuda::budget_at(b) * row + sum * survivor / (128.0 * samples) + fixed;
      if (work < best) best = work, want = cuda::budget_at(b);
    }
    EXPECT_EQ(budget.download(), Bytes(rows, static_cast<std::uint8_t>(want))) << survivor;
  }
}

TEST_F(CudaCertify, ListsOfEachBudget) {
  Random random(5);
  for (const std::size_t rows : {1U, 31U, 1024U, 5000U}) {
    Bytes screened(rows);
    std::vector<std::vector<std::int32_t>> want(cuda::kBudgetCount + 1);
    for (std::size_t r = 0; r < rows; ++r) {
      const auto which = random() % (cuda::kBudgetCount + 1);
      screened[r] = which < cuda::kBudgetCount ? static_cast<std::uint8_t>(cuda::budget_at(static_cast<int>(which)))
                                               : std::uint8_t{0};
      want[which].push_back(static_cast<std::int32_t>(r));
    }
    const GuardedArray<std::uint8_t> device(screened);
    const GuardedArray<std::int32_t> list(rows * (cuda::kBudgetCount + 1)), size(cuda::kBudgetCount + 1);
    ASSERT_CUDA(
        cuda::launch_lists({static_cast<std::int64_t>(rows), device.data(), list.data(), size.data()}, nullptr));
    const std::vector<std::int32_t> lists = list.download(), sizes = size.download();
    for (std::size_t w = 0; w < want.size(); ++w) {
      ASSERT_EQ(sizes[w], static_cast<std::int32_t>(want[w].size()));
      ASSERT_TRUE(std::equal(want[w].begin(), want[w].end(), lists.begin() + static_cast<std::ptrdiff_t>(w * rows)));
    }
    EXPECT_TRUE(list.guards_intact() && size.guards_intact());
  }
}

}  // namespace
}  // namespace dosa::test
