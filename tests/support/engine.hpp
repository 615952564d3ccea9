// A serving engine in small: requests that grow across pages and past K, drafts that are rejected, state that is dropped,
// swapped, copied and spoilt, requests that end and begin.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "dosa/decode.hpp"
#include "dosa/pages.hpp"
#include "score/oracle.hpp"
#include "score/quantize.hpp"
#include "support/cases.hpp"

namespace dosa::test {

inline constexpr std::int64_t kRequests = 3, kColumns = 45, kPageSize = 16, kPages = kRequests * kColumns + 5;
inline constexpr std::int32_t kHeads = 6, kTopk = 24, kRecent = 40;
inline constexpr std::int64_t kRoom = kColumns * kPageSize;

/// What an engine keeps, and beside it the same keys without pages.
class Engine {
 public:
  /// Pages lie `gap` bytes apart.
  explicit Engine(std::uint64_t seed, std::int32_t dim = 32, std::int64_t gap = 28)
      : dim_(dim), gap_(gap), random_(seed), direction_(static_cast<std::size_t>(dim)) {
    pool_.assign(static_cast<std::size_t>(kPages * stride()), 0x7F);
    for (std::int32_t page = 0; page < kPages; ++page) free_.push_back(page);
    std::shuffle(free_.begin(), free_.end(), random_);
    table_.assign(kRequests * kColumns, -1);
    recent_.assign(kRequests * kRecent, -1);
    for (std::int64_t r = 0; r < kRequests; ++r) {
      k_.emplace_back(kRoom * dim_);
      k_scale_.emplace_back(kRoom);
    }
    length_.assign(kRequests, 0);
    for (float& x : direction_) x = normal_(random_);
  }

  /// Writes keys for the next `count` positions of a request, by the library's insert and by hand.
  void append(std::int64_t request, std::int64_t count) {
    std::vector<float> keys;
    std::vector<std::int32_t> slots;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = length_[static_cast<std::size_t>(request)] + i;
      std::int32_t& page = table_[static_cast<std::size_t>(request * kColumns + at / kPageSize)];
      if (page < 0) {
        page = free_.back();
        free_.pop_back();
      }
      slots.push_back(page * static_cast<std::int32_t>(kPageSize) + static_cast<std::int32_t>(at % kPageSize));
      const float along = normal_(random_);
      for (const float x : direction_) keys.push_back(along * x + normal_(random_));
      auto& k = k_[static_cast<std::size_t>(request)];
      k_scale_[static_cast<std::size_t>(request)][static_cast<std::size_t>(at)] = quantize_row(
          std::span(keys).last(dim_), std::span(k).subspan(static_cast<std::size_t>(at * dim_), dim_), ScaleRule::amax);
    }
    MutableTensorView cache = dense_view<void>(pool_.data(), DType::f8_e4m3, {kPages, kPageSize, 1, dim_ + 4});
    cache.stride[0] = stride();
    ASSERT_TRUE(insert_keys(cache, dense_view<const void>(keys.data(), DType::f32, {count, dim_}),
                            dense_view<const void>(slots.data(), DType::i32, {count})));
  }

  void grow(std::int64_t request, std::int64_t accepted) { length_[static_cast<std::size_t>(request)] += accepted; }
  [[nodiscard]] std::int64_t length(std::int64_t request) const { return length_[static_cast<std::size_t>(request)]; }

  /// The request ends, another takes its place.
  void restart(std::int64_t request) {
    for (std::int64_t m = 0; m < kColumns; ++m) {
      std::int32_t& page = table_[static_cast<std::size_t>(request * kColumns + m)];
      if (page >= 0) free_.push_back(page);
      page = -1;
    }
    std::shuffle(free_.begin(), free_.end(), random_);
    length_[static_cast<std::size_t>(request)] = 0;
  }

  /// Requests change places in the batch, with or without their state.
  void swap(std::int64_t a, std::int64_t b, bool with_state) {
    const auto rows = [](auto& array, std::int64_t width, std::int64_t x, std::int64_t y) {
      std::swap_ranges(array.begin() + x * width, array.begin() + (x + 1) * width, array.begin() + y * width);
    };
    if (a == b) return;
    rows(table_, kColumns, a, b);
    if (with_state) rows(recent_, kRecent, a, b);
    std::swap(k_[static_cast<std::size_t>(a)], k_[static_cast<std::size_t>(b)]);
    std::swap(k_scale_[static_cast<std::size_t>(a)], k_scale_[static_cast<std::size_t>(b)]);
    std::swap(length_[static_cast<std::size_t>(a)], length_[static_cast<std::size_t>(b)]);
  }

  [[nodiscard]] std::span<std::int32_t> recent(std::int64_t request) {
    return std::span(recent_).subspan(static_cast<std::size_t>(request * kRecent), kRecent);
  }
  [[nodiscard]] MutableTensorView recent_view() {
    return dense_view<void>(recent_.data(), DType::i32, {kRequests, kRecent});
  }

  /// Queries that drift, so that neighbours choose much the same; lengths of draft tokens.
  DecodeStep step(std::int64_t next_n) {
    if (heads_.empty()) heads_.resize(kRequests * kHeads * dim_);
    for (std::size_t n = 0; n < heads_.size(); ++n) {
      heads_[n] = 0.9F * heads_[n] + 0.3F * normal_(random_) + 0.1F * direction_[n % dim_];
    }
    q_.clear();
    w_.clear();
    lens_.clear();
    for (std::int64_t r = 0; r < kRequests; ++r) {
      for (std::int64_t j = 0; j < next_n; ++j) {
        for (std::int32_t h = 0; h < kHeads; ++h) {
          w_.push_back((h < 2 ? 1.0F : -1.0F) * std::exp(0.3F * normal_(random_)));
          for (std::int32_t d = 0; d < dim_; ++d) {
            q_.push_back(encode_e4m3(4 * heads_[static_cast<std::size_t>((r * kHeads + h) * dim_ + d)] +
                                     0.2F * normal_(random_)));
          }
        }
        // As engines compute it: negative where a slot is drained.
        lens_.push_back(static_cast<std::int32_t>(length(r) == 0 ? j - next_n : length(r) + j + 1));
      }
    }
    TensorView cache = dense_view<const void>(pool_.data(), DType::f8_e4m3, {kPages, kPageSize, 1, dim_ + 4});
    cache.stride[0] = stride();
    return {dense_view<const void>(q_.data(), DType::f8_e4m3, {kRequests, next_n, kHeads, dim_}),
            dense_view<const void>(w_.data(), DType::f32, {kRequests * next_n, kHeads}),
            cache,
            dense_view<const void>(table_.data(), DType::i32, {kRequests, kColumns}),
            dense_view<const void>(lens_.data(), DType::i32, {kRequests, next_n}),
            kTopk};
  }

  /// The rows of a request, with its keys as they are without pages.
  [[nodiscard]] Problem contiguous(std::int64_t request, std::int64_t next_n) const {
    const auto r = static_cast<std::size_t>(request);
    const auto row = static_cast<std::size_t>(request * next_n);
    Problem p;
    p.q = dense_view<const void>(q_.data() + row * static_cast<std::size_t>(kHeads * dim_), DType::f8_e4m3, {next_n, kHeads, dim_});
    p.w = dense_view<const void>(w_.data() + row * kHeads, DType::f32, {next_n, kHeads});
    p.k = dense_view<const void>(k_[r].data(), DType::f8_e4m3, {kRoom, dim_});
    p.k_scale = dense_view<const void>(k_scale_[r].data(), DType::f32, {kRoom});
    p.ke = dense_view<const void>(&lens_[row], DType::i32, {next_n});
    p.topk = kTopk;
    return p;
  }
  /// What a row must be.
  [[nodiscard]] OracleRow expected(std::int64_t request, std::int64_t token, std::int64_t next_n) const {
    return oracle_row(contiguous(request, next_n), token, ReferenceScorer::cpu, Order::score, IndexSpace::absolute);
  }
  /// Where position `id` of a request lies.
  [[nodiscard]] std::int32_t slot_of(std::int64_t request, std::int32_t id) const {
    if (id < 0) return id;
    return table_[static_cast<std::size_t>(request * kColumns + id / kPageSize)] *
               static_cast<std::int32_t>(kPageSize) +
           id % static_cast<std::int32_t>(kPageSize);
  }

 private:
  [[nodiscard]] std::int64_t stride() const { return kPageSize * (dim_ + 4) + gap_; }

  std::int32_t dim_;
  std::int64_t gap_;
  Random random_;
  std::normal_distribution<float> normal_;
  std::vector<float> direction_;
  std::vector<float> heads_;
  std::vector<std::uint8_t> pool_, q_;
  std::vector<std::int32_t> free_, table_, recent_, lens_;
  std::vector<float> w_;
  std::vector<std::vector<std::uint8_t>> k_;
  std::vector<std::vector<float>> k_scale_;
  std::vector<std::int64_t> length_;
};

/// Sometimes something happens between two steps.
inline void disturb(Engine& engine, Random& random) {
  const auto pick = [&] { return static_cast<std::int64_t>(random() % kRequests); };
  const std::int64_t a = pick(), b = pick();
  switch (random() % 40) {
    case 0: std::ranges::fill(engine.recent(a), -1); break;
    case 1: engine.swap(a, b, true); break;
    case 2: engine.swap(a, b, false); break;
    case 3: std::ranges::copy(engine.recent(a), engine.recent(b).begin()); break;
    case 4:
      for (std::int32_t& id : engine.recent(a)) id = static_cast<std::int32_t>(random());
      break;
    case 5: std::ranges::fill(engine.recent(a), static_cast<std::int32_t>(random() % 200)); break;
    case 6:
      if (random() % 4 == 0) engine.restart(a);
      break;
    default: break;
  }
}

}  // namespace dosa::test
