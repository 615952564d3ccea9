// keys, winners, seed and tau on the device against the host's definitions.
#include "backend/cuda/prepare.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "base/dtype.hpp"
#include "cuda/guarded.hpp"
#include "seed/seed.hpp"
#include "select/records.hpp"

namespace dosa::test {
namespace {

using Random = std::mt19937_64;
using Ids = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class CudaPrepare : public CudaTest {};

// ------------------------------------------------------------------------------------------------------------------
// keys

TEST_F(CudaPrepare, KeySummaries) {
  Random random(1);
  for (const std::int64_t nk : {1, 1023, 1024, 1025, 70001}) {
    const auto count = static_cast<std::size_t>(nk);
    std::vector<std::uint8_t> k(count * 128);
    std::vector<float> scale(count);
    const float corner[] = {0.0F,
                            -1.0F,
                            kNaN,
                            kInf,
                            -kInf,
                            1e-45F,
                            -0.0F,
                            std::nextafter(0x1p-40F, 0.0F),
                            0x1p-40F,
                            0x1p20F,
                            std::nextafter(0x1p20F, kInf),
                            1.0F,
                            3e38F,
                            0.3F};
    for (std::size_t i = 0; i < count; ++i) {
      const auto kind = random() % 6;
      for (std::size_t d = 0; d < 128; ++d) {
        std::uint8_t byte = 0;
        do byte = static_cast<std::uint8_t>(random());
        while (is_nan_e4m3(byte));
        if (kind == 1) byte = d == 77 ? byte : 0;  // one component
        if (kind == 2) byte &= 0x87;               // subnormal
        if (kind == 3) byte = 0;                   // zero
        k[i * 128 + d] = byte;
      }
      if (kind == 4 && i % 3 == 0) k[i * 128 + random() % 128] = i % 2 == 0 ? 0x7F : 0xFF;
      scale[i] = i % 5 == 0 ? corner[random() % std::size(corner)] : std::exp2(static_cast<float>(random() % 50) - 35);
    }
    const GuardedArray<std::uint8_t> keys(k);
    const GuardedArray<float> scales(scale);
    const int period = nk % 2 == 0 ? 1 : 3;
    const std::int64_t stride = (cuda::slice_of(nk, 0, period).count + 1023) / 1024 * 1024;
    const auto places = static_cast<std::size_t>(period * stride);
    const GuardedArray<float> rho(places), inv_alpha(places);
    const GuardedArray<std::uint32_t> exempt(static_cast<std::size_t>(period * cuda::mask_words(stride)));
    const GuardedArray<std::uint64_t> exempt_count(std::vector<std::uint64_t>{5});
    ASSERT_CUDA(cudaMemset(exempt.data(), 0, places / 8));
    ASSERT_CUDA(cuda::launch_keys({keys.data(), scales.data(), nk, rho.data(), inv_alpha.data(), exempt.data(),
                                   exempt_count.data(), period, stride},
                                  nullptr));
    const std::vector<float> all_rho = rho.download(), all_inverse = inv_alpha.download();
    std::vector<float> got_rho, got_inverse;
    for (std::int64_t i = 0; i < nk; ++i) {
      got_rho.push_back(all_rho[static_cast<std::size_t>(i % period * stride + i / period)]);
      got_inverse.push_back(all_inverse[static_cast<std::size_t>(i % period * stride + i / period)]);
    }
    std::vector<std::uint32_t> mask = exempt.download();
    std::uint64_t exempts = 0;
    for (std::size_t i = 0; i < count; ++i) {
      double square = 0;
      bool is_exempt = !(scale[i] >= 0x1p-40F && scale[i] <= 0x1p20F);
      for (std::size_t d = 0; d < 128; ++d) {
        square += static_cast<double>(kE4m3Table[k[i * 128 + d]]) * kE4m3Table[k[i * 128 + d]];
        is_exempt = is_exempt || is_nan_e4m3(k[i * 128 + d]);
      }
      exempts += is_exempt ? 1 : 0;
      const auto key = static_cast<std::int64_t>(i);
      cuda::MaskBit at = cuda::mask_bit(key / period);
      at.word += key % period * cuda::mask_words(stride);
      ASSERT_EQ((mask[static_cast<std::size_t>(at.word)] >> at.bit & 1) != 0, is_exempt) << i;
      mask[static_cast<std::size_t>(at.word)] &= ~(1U << at.bit);
      if (is_exempt) {
        ASSERT_EQ(got_rho[i], kInf);
        ASSERT_EQ(got_inverse[i], 0.0F);
        continue;
      }
      const double norm = std::max(std::sqrt(square), 0x1p-6), claimed = got_rho[i] * std::sqrt(128.0);
      ASSERT_GE(claimed * (1 + 1e-15), norm) << i;
      ASSERT_LE(claimed, norm * (1 + 1e-6)) << i;
      ASSERT_EQ(got_inverse[i], 1.0F / scale[i]) << i;
    }
    for (const std::uint32_t word : mask) ASSERT_EQ(word, 0U);  // no key, no bit
    EXPECT_EQ(exempt_count.download()[0], 5 + exempts);
    EXPECT_TRUE(rho.guards_intact() && inv_alpha.guards_intact() && exempt.guards_intact() &&
                exempt_count.guards_intact());
  }
}

// ------------------------------------------------------------------------------------------------------- winners and
// seed

TEST_F(CudaPrepare, WinnersAreAscendingDistinctAndPossible) {
  Random random(2);
  for (const int length : {1, 3, 255, 700, 2048, 4096, 8192, 9000}) {
    constexpr std::int64_t lists = 3, nk = 5000;
    Ids ids;
    std::vector<Record> kept;
    Ids count = {length, length / 2, 0};
    for (std::int64_t i = 0; i < lists * length; ++i) {
      ids.push_back(static_cast<std::int32_t>(random() % 7000) - 1000);
      if (i % 50 == 0) ids.back() = std::numeric_limits<std::int32_t>::min();
      if (i % 50 == 1) ids.back() = std::numeric_limits<std::int32_t>::max();
      kept.push_back(make_record(1.0F, static_cast<std::int32_t>(random() % nk)));
    }
    for (const bool from_kept : {false, true}) {
      const GuardedArray<std::int32_t> device_ids(ids), device_count(count);
      const GuardedArray<Record> device_kept(kept);
      const std::int64_t stride = std::min(length, cuda::kMaxWinners) + 2;
      const GuardedArray<std::int32_t> sorted(static_cast<std::size_t>(lists * stride)), sorted_count(lists);
      ASSERT_CUDA(cuda::launch_winners({lists, from_kept ? device_kept.data() : nullptr, device_ids.data(), length,
                                        device_count.data(), length, nk, sorted.data(), stride, sorted_count.data()},
                                       nullptr));
      const Ids got = sorted.download(), got_count = sorted_count.download();
      for (std::int64_t l = 0; l < lists; ++l) {
        std::set<std::int32_t> want;
        for (std::int64_t i = 0; i < std::min(count[static_cast<std::size_t>(l)], cuda::kMaxWinners); ++i) {
          const auto at = static_cast<std::size_t>(l * length + i);
          const std::int32_t id = from_kept ? id_of(kept[at]) : ids[at];
          if (id >= 0 && id < nk) want.insert(id);
        }
        ASSERT_EQ(got_count[static_cast<std::size_t>(l)], static_cast<std::int32_t>(want.size()));
        ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin() + l * stride));
      }
      EXPECT_TRUE(sorted.guards_intact() && sorted_count.guards_intact());
    }
  }
}

TEST_F(CudaPrepare, WitnessesAreTheHosts) {
  Random random(3);
  for (int trial = 0; trial < 40; ++trial) {
    const int topks[] = {1, 5, 64, 700, 2048, 4096};
    const int topk = topks[random() % std::size(topks)];
    const std::int64_t nk = 1 + static_cast<std::int64_t>(random() % 20000), nq = 13;
    const std::int64_t rows_per_list = 1 + static_cast<std::int64_t>(random() % 5);
    const std::int64_t lists = (nq + rows_per_list - 1) / rows_per_list;
    Ids ks, ke, sorted, sorted_count;
    const std::int64_t stride = 2 * topk;
    std::vector<Ids> winners;
    for (std::int64_t l = 0; l < lists; ++l) {
      std::set<std::int32_t> list;
      const auto size = random() % 4 == 0 ? 0 : random() % static_cast<std::uint64_t>(stride + 1);
      for (std::uint64_t i = 0; i < size; ++i)
        list.insert(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(nk)));
      winners.emplace_back(list.begin(), list.end());
      sorted_count.push_back(static_cast<std::int32_t>(list.size()));
      Ids padded = winners.back();
      padded.resize(static_cast<std::size_t>(stride), -77);
      sorted.insert(sorted.end(), padded.begin(), padded.end());
    }
    for (std::int64_t r = 0; r < nq; ++r) {
      ks.push_back(static_cast<std::int32_t>(random() % 3 == 0 ? random() % static_cast<std::uint64_t>(nk) : 0));
      ke.push_back(static_cast<std::int32_t>(random() % 3 == 0 ? random() % static_cast<std::uint64_t>(nk)
                                                               : static_cast<std::uint64_t>(nk)));
    }
    const GuardedArray<std::int32_t> device_ks(ks), device_ke(ke), device_sorted(sorted), device_count(sorted_count);
    const bool with_winners = trial % 5 != 0;
    const std::int64_t ids_stride = max_witnesses(topk, stride);
    const GuardedArray<std::int32_t> ids(static_cast<std::size_t>(nq * ids_stride)),
        count(static_cast<std::size_t>(nq));
    const GuardedArray<std::int64_t> offset(static_cast<std::size_t>(nq));
    cuda::Inputs in{};
    in.ks = device_ks.data();
    in.ke = device_ke.data();
    in.nq = nq;
    in.nk = nk;
    ASSERT_CUDA(
        cuda::launch_seed({in, 0, nq, 1, topk, with_winners ? device_sorted.data() : nullptr, stride, device_count.data(),
                           rows_per_list, ids.data(), ids_stride, offset.data(), count.data()},
                          nullptr));
    const Ids got = ids.download(), got_count = count.download();
    for (std::int64_t r = 0; r < nq; ++r) {
      const auto row = static_cast<std::size_t>(r);
      const VisibleRange visible{ks[row], std::max(ks[row], ke[row])};
      Ids want(static_cast<std::size_t>(ids_stride));
      const Ids& list = winners[static_cast<std::size_t>(r / rows_per_list)];
      want.resize(static_cast<std::size_t>(chain_witnesses(
          visible, topk, with_winners ? std::span<const std::int32_t>(list) : std::span<const std::int32_t>(), want, hwy::Sorter())));
      ASSERT_EQ(offset.download()[row], r * ids_stride);
      ASSERT_EQ(Ids(got.begin() + r * ids_stride, got.begin() + r * ids_stride + got_count[row]), want)
          << "trial " << trial << " row " << r;
    }
    EXPECT_TRUE(ids.guards_intact() && count.guards_intact() && offset.guards_intact());
  }
}

TEST_F(CudaPrepare, TauIsTheKthKeptScore) {
  constexpr int topk = 70;
  constexpr std::size_t rows = 9;
  Random random(4);
  std::vector<Record> kept(rows * topk, 0);
  Ids count = {topk, topk, topk, topk - 1, 0, topk, topk, topk, topk};
  std::vector<float> want;
  for (std::size_t r = 0; r < rows; ++r) {
    float worst = kInf;
    for (std::size_t i = 0; i < topk; ++i) {
      float score = std::uniform_real_distribution<float>(-1, 1)(random);
      if (r == 1 && i == 33) score = kNaN;
      if (r == 5) score = -kInf;
      if (r == 6) score = kInf;
      if (r == 7) score = i % 2 == 0 ? -0.0F : 0.0F;
      worst = std::min(worst, score);
      kept[r * topk + i] = make_record(score, static_cast<std::int32_t>(i));
    }
    want.push_back(r == 1 || count[r] < topk ? -kInf : worst);
  }
  const GuardedArray<Record> device_kept(kept);
  const GuardedArray<std::int32_t> device_count(count);
  const GuardedArray<float> tau(rows);
  ASSERT_CUDA(cuda::launch_tau(
      {static_cast<std::int64_t>(rows), topk, device_kept.data(), device_count.data(), tau.data()}, nullptr));
  EXPECT_EQ(tau.download(), want);
  EXPECT_TRUE(tau.guards_intact());
}

}  // namespace
}  // namespace dosa::test
