// write: kept records, sorted, to ids and scores.
//
// One CTA a row, a bitonic network over kItems * 256 records: steps inside a thread's registers, inside a warp by
// shuffles, across warps through shared memory.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/order.cuh"
#include "backend/cuda/sort.cuh"
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;

// Keys whose ascending order is the wanted one: records themselves, or records with their halves swapped (by id).
__device__ __forceinline__ Record swap_halves(Record record) { return record << 32 | record >> 32; }

template <int kItems>
__global__ __launch_bounds__(kThreads) void write_kernel(WriteArgs args) {
  extern __shared__ Record exchange[];
  const std::int64_t r = blockIdx.x;
  const std::int64_t query = args.first_row + r;
  const int count = args.kept_count[r];
  const Record* kept = args.kept + r * args.topk;
  Record item[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    item[i] = at < count ? kept[at] : kEveryRecord;  // padding sorts last: its halves are all ones
    if (args.ascending) item[i] = swap_halves(item[i]);
  }
  sort<kThreads>(item, exchange);

  // Through shared memory again, so that neighbouring threads write neighbouring elements.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) exchange[threadIdx.x * kItems + i] = item[i];
  __syncthreads();
  const auto offset = args.relative ? static_cast<std::int32_t>(visible_keys(args.in, query).begin) : 0;
  for (int at = static_cast<int>(threadIdx.x); at < args.topk; at += kThreads) {
    const Record record = args.ascending ? swap_halves(exchange[at]) : exchange[at];
    const bool valid = at < count;
    args.ids[query * args.ids_stride + at] = valid ? id_of(record) - offset : -1;
    if (args.scores != nullptr) {
      args.scores[query * args.scores_stride + at] = valid ? score_of(record) : __uint_as_float(0xFF800000U);
    }
  }
}

template <int kItems>
cudaError_t launch(const WriteArgs& args, cudaStream_t stream) {
  write_kernel<kItems>
      <<<static_cast<unsigned>(args.rows), kThreads, kItems * kThreads * sizeof(Record), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_write(const WriteArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (args.topk <= 1 * kThreads) return launch<1>(args, stream);
  if (args.topk <= 2 * kThreads) return launch<2>(args, stream);
  if (args.topk <= 4 * kThreads) return launch<4>(args, stream);
  if (args.topk <= 8 * kThreads) return launch<8>(args, stream);
  return launch<16>(args, stream);
}

}  // namespace dosa::cuda
