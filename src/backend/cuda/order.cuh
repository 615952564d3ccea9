// The total order of scores and the record format on the device: base/numeric.hpp and select/records.hpp say what they
// mean.
#pragma once

#include <cstdint>

#include "backend/cuda/pages.cuh"

namespace dosa::cuda {

inline constexpr std::uint32_t kNaNCode = 0xFFFFFFFFU;
inline constexpr std::uint32_t kBestCode = 0x7FFFFFFFU - 0x7F800000U;  // of +inf
inline constexpr std::uint32_t kZeroCode = 0x7FFFFFFFU;                // 0x80000000, which would be -0.0, is no code
inline constexpr std::uint32_t kWorstNumberCode = 0xFF800000U;         // of -inf
inline constexpr Record kEveryRecord = ~Record{0};                     // above every record

__device__ __forceinline__ std::uint32_t order_code(float score) {
  if (score != score) return kNaNCode;
  const std::uint32_t bits = __float_as_uint(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? bits : 0x7FFFFFFFU - bits;
}

__device__ __forceinline__ float score_of_code(std::uint32_t code) {
  if (code == kNaNCode) return __uint_as_float(0x7FC00000U);
  return __uint_as_float((code & 0x80000000U) != 0 ? code : 0x7FFFFFFFU - code);
}

__device__ __forceinline__ Record make_record(float score, std::uint32_t id) {
  const std::uint32_t negative_zero = __float_as_uint(score) == 0x80000000U ? 1U : 0U;
  return Record{order_code(score)} << 32 | (id << 1 | negative_zero);
}

__device__ __forceinline__ std::uint32_t code_of(Record record) { return static_cast<std::uint32_t>(record >> 32); }

__device__ __forceinline__ std::int32_t id_of(Record record) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(record) >> 1);
}

__device__ __forceinline__ float score_of(Record record) {
  const float score = score_of_code(code_of(record));
  return (record & 1U) != 0 ? -score : score;
}

/// What a record proves about the K-th best score: nothing if it is a NaN.
__device__ __forceinline__ float tau_of(Record kth) {
  return code_of(kth) == kNaNCode ? __uint_as_float(0xFF800000U) : score_of(kth);
}

__device__ __forceinline__ void append(const RecordLists& lists, std::int64_t row, std::int64_t at, Record record) {
  if (at < lists.stride) {
    lists.records[row * lists.stride + at] = record;
  } else {
    lists.lost[row] = 1;
  }
}

/// Visible keys of one query.
struct Visible {
  std::int64_t begin;
  std::int64_t end;
};

/// Their numbers in a slice of keys.
__device__ __forceinline__ Visible visible_in(const KeySlice& keys, const std::int32_t* ks, const std::int32_t* ke, std::int64_t query) {
  const std::int64_t begin = ks == nullptr ? 0 : keys_before(keys, ks[query]);
  const std::int64_t end = ke == nullptr ? keys.count : keys_before(keys, ke[query]);
  return {begin, max(begin, end)};
}

__device__ __forceinline__ Visible visible_keys(const Inputs& in, std::int64_t query) {
  if (in.pages.owner != nullptr && request_of(in.pages, query) < 0) return {0, 0};
  const std::int64_t begin = in.ks == nullptr ? 0 : max(in.ks[query], 0);
  const std::int64_t end = in.ke == nullptr ? in.nk : min(static_cast<std::int64_t>(in.ke[query]), in.nk);
  return {begin, max(begin, end)};
}

}  // namespace dosa::cuda
