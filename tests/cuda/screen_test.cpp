#include <set>
// launch_screen against its definition, evaluated in f64 over the emulator's dots; and launch_compact against the mask.
#include <bit>
#include <numeric>

#include "base/dtype.hpp"
#include "cuda/problem.hpp"

namespace dosa::test {
namespace {

using cuda::kDim;

float of_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t nearest_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/// Dot of a bound row and a key as the tensor core rounds it.
float dot(const std::uint8_t* row, const std::uint8_t* key) { return sm90_dot(row, key, kDim); }

struct Bounds {
  std::vector<std::uint8_t> rows;     // [n][R][128]
  std::vector<std::uint16_t> weight;  // [n][R - 2]
  std::vector<float> c, sigma, tau;
};

struct Screened {
  std::vector<std::uint32_t> mask;
  std::int64_t stride;
  [[nodiscard]] bool survives(std::int64_t row, std::int64_t i) const {
    const cuda::MaskBit bit = cuda::mask_bit(i);
    return (mask[static_cast<std::size_t>(row * stride + bit.word)] >> bit.bit & 1U) != 0;
  }
};

struct KeyFacts {
  std::vector<float> rho, inv_alpha;
  std::vector<std::uint32_t> exempt;
};

Screened screen(const DeviceProblem& p, const KeyFacts& facts, const Bounds& bounds, int budget,
                const std::vector<std::int32_t>& list, std::int64_t first_row, std::int64_t rows,
                const cuda::KeySlice& slice) {
  const DeviceInputs inputs(p);
  std::vector<float> slice_rho, slice_inv_alpha;
  for (std::int64_t i = 0; i < slice.count; ++i) {
    slice_rho.push_back(facts.rho[static_cast<std::size_t>(cuda::key_at(slice, i))]);
    slice_inv_alpha.push_back(facts.inv_alpha[static_cast<std::size_t>(cuda::key_at(slice, i))]);
  }
  const DeviceArray<float> rho(slice_rho);
  const DeviceArray<float> inv_alpha(slice_inv_alpha);
  const DeviceArray<std::uint32_t> exempt(facts.exempt);
  const DeviceArray<std::int32_t> device_list(list);
  const DeviceArray<std::int32_t> list_size(std::vector<std::int32_t>{static_cast<std::int32_t>(list.size())});
  const DeviceArray<std::uint8_t> bound_rows(bounds.rows);
  const DeviceArray<std::uint16_t> weight(bounds.weight);
  const DeviceArray<float> c(bounds.c);
  const DeviceArray<float> sigma(bounds.sigma);
  const DeviceArray<float> tau(bounds.tau);
  const std::int64_t stride = cuda::mask_words(slice.count) + 4;
  DeviceArray<std::uint32_t> mask(static_cast<std::size_t>(rows * stride));
  Screened first;
  for (int launch = 0; launch < 3; ++launch) {
    mask.fill(0xAB);
    const cuda::ScreenArgs args{.k = inputs.k.get(),
                                .rho = rho.get(),
                                .inv_alpha = inv_alpha.get(),
                                .exempt = exempt.get(),
                                .ks = inputs.ks.get(),
                                .ke = inputs.ke.get(),
                                .first_row = first_row,
                                .keys = slice,
                                .budget = budget,
                                .list = device_list.get(),
                                .list_size = list_size.get(),
                                .list_capacity = rows,
                                .bound_rows = bound_rows.get(),
                                .bound_stride = budget * kDim,
                                .weight = weight.get(),
                                .weight_stride = budget - 2,
                                .c = c.get(),
                                .sigma = sigma.get(),
                                .tau = tau.get(),
                                .mask = mask.get(),
                                .mask_stride = stride};
    EXPECT_EQ(cuda::launch_screen(args, launch > 0 ? multiprocessors() : 7, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Screened got{mask.download(), stride};
    // Chunks of keys, and so the words that are written for nothing, depend on the number of multiprocessors.
    std::int64_t differences = 0;
    for (const std::int32_t row : list) {
      for (std::int64_t i = 0; launch > 0 && i < slice.count; ++i) {
        const std::int64_t key = cuda::key_at(slice, i);
        if (key < p.begin(first_row + row) || key >= p.end(first_row + row)) continue;
        differences += got.survives(row, i) != first.survives(row, i) ? 1 : 0;
      }
    }
    EXPECT_EQ(differences, 0) << "launch " << launch;
    first = std::move(got);
  }
  return first;
}

class CudaScreen : public CudaTest {};

TEST_F(CudaScreen, DecidesAsDefined) {
  for (const int budget : {8, 12, 16, 20, 24, 32}) {
    // All keys, or every third block of them.
    const cuda::KeySlice slice = budget % 8 == 0 ? cuda::slice_of(7000, 0, 1) : cuda::slice_of(7000, 1, 3);
    std::mt19937 random(static_cast<unsigned>(budget));
    std::normal_distribution<float> normal;
    const int retained = budget - 2;
    const std::int64_t first_row = 2;
    const std::int64_t rows = 29;
    DeviceProblem p = DeviceProblem::plain(8, 40, 7000, static_cast<unsigned>(budget));
    for (std::int64_t q = 0; q < p.nq; ++q) {
      p.ks[q] = static_cast<std::int32_t>(random() % 1500);
      p.ke[q] = q % 9 == 4 ? p.ks[q] : static_cast<std::int32_t>(3000 + random() % 4500);
    }
    KeyFacts facts;
    facts.exempt.resize(static_cast<std::size_t>(cuda::mask_words(p.nk)));
    std::vector<bool> exempt(p.nk);
    for (std::int64_t i = 0; i < p.nk; ++i) {
      exempt[i] = random() % 50 == 0;
      facts.rho.push_back(exempt[i] ? std::numeric_limits<float>::infinity() : std::abs(normal(random)) * 100);
      facts.inv_alpha.push_back(exempt[i] ? 0.0F : std::exp2(normal(random)));
      if (exempt[i]) {
        if (random() % 2 == 0) p.k[i * kDim + random() % kDim] = 0x7F;
      }
    }
    for (std::int64_t i = 0; i < slice.count; ++i) {
      const std::int64_t key = cuda::key_at(slice, i);
      if (key < p.nk && exempt[key]) facts.exempt[static_cast<std::size_t>(cuda::mask_bit(i).word)] |= 1U << cuda::mask_bit(i).bit;
    }
    Bounds bounds;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (int j = 0; j < budget; ++j) {
        float row[kDim];
        for (float& x : row) x = normal(random);
        bounds.rows.resize(bounds.rows.size() + kDim);
        quantize_row(row, {bounds.rows.data() + bounds.rows.size() - kDim, kDim}, ScaleRule::amax);
      }
      for (int j = 0; j < retained; ++j) bounds.weight.push_back(nearest_bf16(0.01F * normal(random)));
      bounds.c.push_back(0.5F * std::abs(normal(random)) + 0.01F);
      bounds.sigma.push_back(0.01F * normal(random));
      bounds.sigma.push_back(0.001F * normal(random));
      bounds.tau.push_back(1000.0F * normal(random));
    }
    std::vector<std::int32_t> list;
    for (std::int32_t r = 0; r < rows; ++r) {
      if (r % 8 != 3) list.push_back(r);
    }
    const Screened got = screen(p, facts, bounds, budget, list, first_row, rows, slice);

    std::int64_t pairs = 0;
    std::int64_t unclear = 0;
    std::int64_t rejected = 0;
    std::int64_t wrong = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const bool listed = r % 8 != 3;
      for (std::int64_t i = 0; i < slice.count; i += listed ? 1 + random() % 3 : 1) {
        const std::int64_t key = cuda::key_at(slice, i);
        if (!listed) {
          const std::size_t at = static_cast<std::size_t>(r * got.stride + cuda::mask_bit(i).word);
          ASSERT_EQ(got.mask[at], 0xABABABABU) << "a row that was not listed";
          continue;
        }
        const bool visible = key >= p.begin(first_row + r) && key < p.end(first_row + r);
        if (!visible) {
          const std::int64_t begin = p.begin(first_row + r), end = p.end(first_row + r), run = i / cuda::kMaskRun;
          const int first = cuda::keys_before(slice, begin), last = cuda::keys_before(slice, end);
          const bool run_seen = first < last && run >= first / cuda::kMaskRun && run * cuda::kMaskRun < last;
          ASSERT_FALSE(run_seen && got.survives(r, i))
              << "row " << r << " key " << key << " is not visible, budget " << budget;
          continue;
        }
        if (exempt[key]) {
          ASSERT_TRUE(got.survives(r, i)) << "exempt";
          continue;
        }
        const std::uint8_t* k = p.k.data() + key * kDim;
        double u = 0;
        double size = 0;
        const auto add = [&](double term) {
          u += term;
          size += std::abs(term);
        };
        add(static_cast<double>(facts.rho[key]) * bounds.c[r]);
        add(-static_cast<double>(bounds.tau[r]) * facts.inv_alpha[key]);
        for (int a = 0; a < 2; ++a) {
          add(-static_cast<double>(bounds.sigma[2 * r + a]) * dot(&bounds.rows[(r * budget + retained + a) * kDim], k));
        }
        for (int j = 0; j < retained; ++j) {
          const float x = dot(&bounds.rows[(r * budget + j) * kDim], k);
          add(static_cast<double>(of_bf16(bounds.weight[r * retained + j])) *
              of_bf16(x > 0 ? nearest_bf16(x) : std::uint16_t{0}));
        }
        ++pairs;
        rejected += got.survives(r, i) ? 0 : 1;
        if (std::abs(u) <= size * 0x1p-16) {
          ++unclear;
        } else if (got.survives(r, i) != (u >= 0) && ++wrong <= 3) {
          ADD_FAILURE() << "budget " << budget << " row " << r << " key " << key << ": u " << u << " of " << size;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "budget " << budget;
    EXPECT_LT(unclear * 1000, pairs);
    EXPECT_GT(rejected * 10, pairs);
    EXPECT_LT(rejected * 10, pairs * 9);
  }
}

// Retained heads alone, no allowance but those of the weights and of tau: nothing at or above tau may be rejected, and
// ties at tau are many.
TEST_F(CudaScreen, RejectsNothingThatReachesTau) {
  for (const int budget : {8, 16, 24, 32}) {
    const int heads = budget - 2;
    DeviceProblem p = DeviceProblem::plain(heads, 24, 4096, static_cast<unsigned>(budget));
    KeyFacts facts;
    for (std::int64_t i = 0; i < p.nk; ++i) {
      if (i % 3 == 0) std::copy_n(p.k.data() + i / 30 * 30 * kDim, kDim, p.k.data() + i * kDim);  // equal keys
      if (i % 3 == 0) p.k_scale[i] = p.k_scale[i / 30 * 30];
      facts.rho.push_back(1.0F);
      facts.inv_alpha.push_back(1.0F / p.k_scale[i]);
    }
    facts.exempt.resize(static_cast<std::size_t>(cuda::mask_words(p.nk)));
    Bounds bounds;
    bounds.rows = p.q;
    std::vector<float> tau;
    std::vector<std::vector<float>> scores(p.nq);
    for (std::int64_t q = 0; q < p.nq; ++q) {
      const QueryScorer scorer = p.scorer(q);
      for (std::int64_t key = 0; key < p.end(q); ++key) scores[q].push_back(p.score(scorer, key));
      std::vector<float> sorted = scores[q];
      std::nth_element(sorted.begin(), sorted.begin() + 200, sorted.end(), std::greater<>());
      tau.push_back(q % 4 == 0 ? 0.0F : sorted[200]);
      for (int h = 0; h < heads; ++h) {
        // The share of sum |w| x that rounding x to bf16 may take, and half a unit more.
        const double w = p.w[q * p.w_stride + h];
        const double safe = std::abs(w) * (w > 0 ? 1 + 0x1p-8 + 0x1p-11 : 1 - 0x1p-8 - 0x1p-11);
        auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(safe)) >> 16;
        if (w > 0 && of_bf16(static_cast<std::uint16_t>(bits)) < safe) ++bits;
        if (w < 0 && of_bf16(static_cast<std::uint16_t>(bits)) > safe) --bits;
        bounds.weight.push_back(static_cast<std::uint16_t>(w < 0 ? bits | 0x8000 : bits));
      }
      bounds.c.push_back(0x1p-100F);
      bounds.sigma.insert(bounds.sigma.end(), {0.0F, 0.0F});
      bounds.tau.push_back(static_cast<float>(tau.back() - 0x1p-18 * std::abs(tau.back()) - 0x1p-90));
    }
    std::vector<std::uint8_t> rows(static_cast<std::size_t>(p.nq * budget * kDim));
    for (std::int64_t q = 0; q < p.nq; ++q) {
      std::copy_n(p.q.data() + q * heads * kDim, heads * kDim, rows.data() + q * budget * kDim);
    }
    bounds.rows = rows;
    std::vector<std::int32_t> list(p.nq);
    std::iota(list.begin(), list.end(), 0);
    const Screened got = screen(p, facts, bounds, budget, list, 0, p.nq, cuda::slice_of(p.nk, 0, 1));
    std::int64_t rejected = 0;
    std::int64_t pairs = 0;
    for (std::int64_t q = 0; q < p.nq; ++q) {
      for (std::int64_t key = 0; key < p.end(q); ++key, ++pairs) {
        if (got.survives(q, key)) continue;
        ++rejected;
        ASSERT_LT(scores[q][key], tau[q]) << "budget " << budget << " row " << q << " key " << key;
      }
    }
    EXPECT_GT(rejected * 2, pairs) << "budget " << budget;
  }
}

TEST_F(CudaScreen, CompactListsEveryBit) {
  std::mt19937 random(1);
  for (const auto& [capacity, group] : {std::pair<std::int64_t, int>{1 << 20, 1}, {3000, 1}, {1 << 20, 4}, {2500, 16}, {1 << 20, 16}}) {
    const std::int64_t first_row = 3;
    const std::int64_t rows = 1300;
    const std::int64_t nk = 8 * 1024 + 100;
    const cuda::KeySlice slice = group == 4 ? cuda::slice_of(nk, 2, 3) : cuda::slice_of(nk, 0, 1);
    const std::int64_t stride = cuda::mask_words(slice.count) + 8;
    std::vector<std::uint32_t> mask(static_cast<std::size_t>(rows * stride), 0xFFFFFFFFU);
    std::vector<std::int32_t> ks(first_row + rows);
    std::vector<std::int32_t> ke(first_row + rows);
    std::vector<std::uint8_t> screened(rows);
    std::vector<std::vector<std::int32_t>> expected(rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t query = first_row + r;
      ks[query] = static_cast<std::int32_t>(random() % 9000) - 100;
      ke[query] = ks[query] + static_cast<std::int32_t>(random() % 8000) - 50;
      screened[r] = r % 7 == 2 ? 0 : 1;
      const std::int64_t begin = std::max(ks[query], 0), end = std::min<std::int64_t>(ke[query], nk);
      const int first = cuda::keys_before(slice, begin), last = cuda::keys_before(slice, end);
      for (int run = first / cuda::kMaskRun; first < last && run * cuda::kMaskRun < last; ++run) {  // other words are unspecified
        for (std::int64_t word = std::int64_t{run} * cuda::kMaskRunWords; word < (run + 1) * cuda::kMaskRunWords; ++word) {
          mask[r * stride + word] = 0;
          for (int bit = 0; bit < 32; ++bit) {
            const std::int64_t key = cuda::key_at(slice, cuda::mask_key(word, bit));
            if (key < begin || key >= end || random() % (r % 50 == 0 ? 1 : 40) != 0) continue;
            mask[r * stride + word] |= 1U << bit;
            if (screened[r] != 0) expected[r].push_back(static_cast<std::int32_t>(key));
          }
        }
      }
    }
    const DeviceArray<std::uint32_t> device_mask(mask);
    const DeviceArray<std::int32_t> device_ks(ks);
    const DeviceArray<std::int32_t> device_ke(ke);
    const DeviceArray<std::uint8_t> device_screened(screened);
    const std::int64_t groups = (rows + group - 1) / group;
    DeviceArray<std::int32_t> ids(static_cast<std::size_t>(capacity + 1));
    DeviceArray<std::int64_t> offset(groups);
    DeviceArray<std::int32_t> count(groups);
    DeviceArray<std::uint8_t> lost(rows);
    DeviceArray<std::uint64_t> pairs(2);
    ids.fill(0xAB);
    lost.fill(0);
    pairs.fill(0);
    const cuda::CompactArgs args{.ks = device_ks.get(),
                                 .ke = device_ke.get(),
                                 .first_row = first_row,
                                 .rows = rows,
                                 .keys = slice,
                                 .mask = device_mask.get(),
                                 .mask_stride = stride,
                                 .screened = device_screened.get(),
                                 .group = group,
                                 .capacity = capacity,
                                 .ids = ids.get(),
                                 .offset = offset.get(),
                                 .count = count.get(),
                                 .lost = lost.get(),
                                 .survivors = pairs.get(),
                                 .listed = pairs.get() + 1};
    ASSERT_EQ(cuda::launch_compact(args, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<std::int32_t> got = ids.download();
    const std::vector<std::int64_t> got_offset = offset.download();
    const std::vector<std::int32_t> got_count = count.download();
    const std::vector<std::uint8_t> got_lost = lost.download();
    std::int64_t at = 0;
    std::uint64_t survivors = 0, listed = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::set<std::int32_t> want;
      std::uint64_t seeing = 0;
      for (std::int64_t r = g * group; r < std::min(rows, (g + 1) * group); ++r) {
        want.insert(expected[r].begin(), expected[r].end());
        survivors += expected[r].size();
        const std::int64_t query = first_row + r;
        const std::int64_t begin = std::max(ks[query], 0), end = std::min<std::int64_t>(ke[query], nk);
        if (screened[r] != 0 && cuda::keys_before(slice, begin) < cuda::keys_before(slice, end)) ++seeing;
      }
      const auto size = static_cast<std::int64_t>(want.size());
      listed += want.size() * seeing;
      const bool fits = at + size <= capacity;
      for (std::int64_t r = g * group; r < std::min(rows, (g + 1) * group); ++r) ASSERT_EQ(got_lost[r], fits ? 0 : 1) << r;
      ASSERT_EQ(got_count[g], fits ? size : 0) << g;
      if (fits) {
        ASSERT_EQ(got_offset[g], at);
        std::vector<std::int32_t> list(got.begin() + at, got.begin() + at + size);
        std::sort(list.begin(), list.end());
        ASSERT_TRUE(std::equal(list.begin(), list.end(), want.begin(), want.end())) << g;
      }
      at += size;
    }
    ASSERT_EQ(pairs.download(), (std::vector<std::uint64_t>{survivors, listed}));
    ASSERT_EQ(got.back(), static_cast<std::int32_t>(0xABABABAB));
  }
}

}  // namespace
}  // namespace dosa::test
