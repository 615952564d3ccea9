// Rows of a pass on the device (struct Rows says what they are).
#pragma once

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

/// How many rows a pass of at most `most` has.
__device__ __forceinline__ std::int64_t count_of(const Rows& pass, std::int64_t most) {
  if (pass.list == nullptr) return most;
  return min(most, max(*pass.list_size - pass.first, std::int64_t{0}));
}

/// Row of the slice.
__device__ __forceinline__ std::int64_t row_of(const Rows& pass, std::int64_t r) {
  return pass.list == nullptr ? pass.first + r * pass.step : pass.list[pass.first + r];
}

/// Where what is kept of a row lies.
__device__ __forceinline__ std::int64_t place_of(const Rows& pass, std::int64_t row) {
  return pass.list == nullptr ? row / pass.step : row;
}

}  // namespace dosa::cuda
