// Records: (score, key id) pairs of keys that may still win, and their exact selection.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "base/error.hpp"
#include "base/mutation.hpp"
#include "base/numeric.hpp"

namespace dosa {

/// A record as one integer: records in ascending order are in the selection's total order (score descending, then id).
/// Bits 63..32 order_code(score), 31..1 id, 0 set for a score of -0.0 (equal to +0.0 in the order, not in its bits).
using Record = std::uint64_t;

inline Record make_record(float score, std::int32_t id) noexcept {
  const bool negative_zero = std::bit_cast<std::uint32_t>(score) == 0x80000000U;
  return (std::uint64_t{order_code(score)} << 32) | (std::uint64_t{static_cast<std::uint32_t>(id)} << 1) |
         (negative_zero ? 1U : 0U);
}

inline std::int32_t id_of(Record record) noexcept { return static_cast<std::int32_t>((record >> 1) & 0x7FFFFFFFU); }

inline float score_of(Record record) noexcept {
  const float score = score_of_code(static_cast<std::uint32_t>(record >> 32));
  return (record & 1U) != 0 ? -score : score;
}

/// What a record proves about the K-th best score: nothing if it is a NaN.
inline float tau_of(Record kth) noexcept {
  const float score = score_of(kth);
  if (mutated(Mutation::tau_too_high)) return std::nextafter(score, std::numeric_limits<float>::infinity());
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

/// A bounded buffer of records of one query. When full it is compacted exactly: the K first records stay and tau rises to
/// the K-th. A later tie with a lower id still enters, because only scores below tau are turned away.
class RecordBuffer {
 public:
  RecordBuffer() = default;
  /// `storage` holds more than k records.
  RecordBuffer(std::span<Record> storage, std::int32_t k) noexcept
      : data_(storage.data()), capacity_(static_cast<std::int32_t>(storage.size())), k_(k) {
    DOSA_INVARIANT(capacity_ > k_);
  }

  [[nodiscard]] float tau() const noexcept { return tau_; }
  /// A bound below this is rejected; one that equals it may be a tie with a lower id.
  [[nodiscard]] float least_bound() const noexcept {
    return mutated(Mutation::reject_ties) ? std::nextafter(tau_, std::numeric_limits<float>::infinity()) : tau_;
  }
  [[nodiscard]] std::int32_t size() const noexcept { return size_; }
  [[nodiscard]] std::int32_t k() const noexcept { return k_; }
  [[nodiscard]] std::int64_t compactions() const noexcept { return compactions_; }
  [[nodiscard]] std::span<Record> records() noexcept { return {data_, static_cast<std::size_t>(size_)}; }

  /// Forgets the records, not what they proved.
  void clear() noexcept { size_ = 0; }

  /// Takes the record unless its score is below tau. Not `score >= tau`, which would lose NaN records that must fill a row.
  void push(float score, std::int32_t id) noexcept {
    if (score < tau_) return;
    if (size_ == capacity_) compact();
    data_[size_++] = make_record(score, id);
  }

  /// Drops the records whose id is not `wanted`; tau stays.
  template <class Wanted>
  void keep(const Wanted& wanted) noexcept {
    size_ = static_cast<std::int32_t>(std::remove_if(data_, data_ + size_, [&](Record record) { return !wanted(id_of(record)); }) - data_);
  }

  /// Keeps the K first records, if there are more, and raises tau to the K-th.
  void compact() noexcept {
    if (size_ < k_) return;
    std::nth_element(data_, data_ + (k_ - 1), data_ + size_);
    keep_first();
  }

  /// The same, in order; `sort(first, count)` sorts ascending. Sooner than compacting records that are sorted next.
  template <class Sort>
  void sort(const Sort& sort_records) noexcept {
    sort_records(data_, static_cast<std::size_t>(size_));
    if (size_ >= k_) keep_first();
  }

 private:
  // The K-th is in its place.
  void keep_first() noexcept {
    tau_ = std::max(tau_, tau_of(data_[k_ - 1]));
    compactions_ += size_ == capacity_ ? 1 : 0;
    size_ = k_;
  }

  Record* data_ = nullptr;
  std::int32_t size_ = 0;
  std::int32_t capacity_ = 0;
  std::int32_t k_ = 0;
  float tau_ = -std::numeric_limits<float>::infinity();
  std::int64_t compactions_ = 0;
};

}  // namespace dosa
