// Keys in pages, on the device (struct Pages says how they lie).
#pragma once

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

/// Neighbouring rows of a pass that belong to one request.
__host__ __device__ __forceinline__ std::int64_t queries_together(const Pages& pages, const Rows& pass) {
  return pass.list != nullptr || pages.owner != nullptr ? 1 : pages.queries;
}

/// The request whose keys a query sees; -1: none that exists.
__device__ __forceinline__ std::int64_t request_of(const Pages& pages, std::int64_t query) {
  if (pages.owner == nullptr) return pages.queries > 0 ? query / pages.queries : 0;
  const std::int64_t request = pages.owner[query];
  return request >= 0 && request < pages.requests ? request : -1;
}

/// What the table says of a block of a request's keys: it need not be a page of the pool.
__device__ __forceinline__ std::int32_t page_of(const Pages& pages, std::int64_t request, std::int64_t block) {
  return pages.table[request * pages.table_stride + block * pages.block_stride];
}

__device__ __forceinline__ bool exists(const Pages& pages, std::int64_t page) { return page >= 0 && page < pages.count; }

}  // namespace dosa::cuda
