// gather_pages: keys in pages to contiguous ones, read once more than they would have to be, so that every stage of prefill finds
// them as it knows them.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/order.cuh"
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpKeys = 16;  // keys that a warp copies: never of two pages
constexpr int kMostCtas = 4096;

// What every row sees of the gathered keys.
__global__ __launch_bounds__(kThreads) void gather_ranges(const __grid_constant__ GatherPagesArgs args) {
  const std::int64_t query = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (query >= args.in.nq) return;
  const Visible visible = visible_keys(args.in, query);
  const bool any = visible.begin < visible.end;
  const std::int64_t request = any ? request_of(args.in.pages, query) : 0;
  const std::int64_t origin = request * args.in.nk;
  args.ks[query] = static_cast<std::int32_t>(any ? origin + visible.begin : 0);
  args.ke[query] = static_cast<std::int32_t>(any ? origin + visible.end : 0);
  if (any) atomicMax(&args.seen_to[request], static_cast<std::int32_t>(visible.end));
}

// Words, because pages need not be aligned to more.
__global__ __launch_bounds__(kThreads) void gather_keys(const __grid_constant__ GatherPagesArgs args) {
  const Pages& pages = args.in.pages;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t runs = args.in.nk / kWarpKeys;  // of a request
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / 32);
  for (std::int64_t i = std::int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < pages.requests * runs; i += warps) {
    const std::int64_t request = i / runs, key = i % runs * kWarpKeys;
    const bool seen = key < args.seen_to[request];
    const std::int64_t page = seen ? page_of(pages, request, key >> pages.page_shift) : -1;
    const bool there = seen && exists(pages, page);
    const std::int64_t in_page = key & ((1 << pages.page_shift) - 1);
    const auto* values = reinterpret_cast<const std::uint32_t*>(pages.pool + (there ? page * pages.stride + in_page * kDim : 0));
    const auto* scales = reinterpret_cast<const float*>(pages.pool + (there ? page * pages.stride + (kDim << pages.page_shift) : 0));
    auto* to = reinterpret_cast<std::uint32_t*>(args.k + i * kWarpKeys * kDim);
    std::uint32_t word[kWarpKeys];
#pragma unroll
    for (int n = 0; n < kWarpKeys; ++n) word[n] = there ? values[n * (kDim / 4) + lane] : 0;
#pragma unroll
    for (int n = 0; n < kWarpKeys; ++n) to[n * (kDim / 4) + lane] = word[n];
    if (lane < kWarpKeys) args.k_scale[i * kWarpKeys + lane] = there ? scales[in_page + lane] : seen ? 0.0F : 1.0F;
  }
}

}  // namespace

cudaError_t launch_gather_pages(const GatherPagesArgs& args, cudaStream_t stream) {
  const Pages& pages = args.in.pages;
  const auto seen_bytes = static_cast<std::size_t>(pages.requests) * sizeof(std::int32_t);
  const cudaError_t error = cudaMemsetAsync(args.seen_to, 0, seen_bytes, stream);
  if (error != cudaSuccess || args.in.nq == 0) return error;
  gather_ranges<<<static_cast<unsigned>((args.in.nq + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
  const std::int64_t runs = pages.requests * (args.in.nk / kWarpKeys);
  if (runs == 0) return cudaGetLastError();
  const std::int64_t ctas = (runs + kThreads / 32 - 1) / (kThreads / 32);
  gather_keys<<<static_cast<unsigned>(std::min<std::int64_t>(ctas, kMostCtas)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
