// Row lengths, counted.
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void count_rows(Inputs in, int topk, Counters* counters) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.nq) return;
  const std::int64_t ks = in.ks == nullptr ? 0 : in.ks[row];
  const std::int64_t ke = in.ke == nullptr ? in.nk : in.ke[row];
  const std::int64_t begin = ks < 0 ? 0 : ks > in.nk ? in.nk : ks;
  const std::int64_t end = ke < begin ? begin : ke > in.nk ? in.nk : ke;
  const auto add = [](std::uint64_t& counter, std::int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(value));
  };
  const std::int64_t visible = end - begin;
  if (ks < 0 || ks > in.nk || ke < 0 || ke > in.nk) add(counters->clamped_rows, 1);
  add(visible == 0 ? counters->empty : visible <= topk ? counters->short_rows : counters->full, 1);
  add(counters->visible, visible);
}

}  // namespace

cudaError_t launch_count(const Inputs& in, int topk, Counters* counters, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(counters, 0, sizeof(Counters), stream);
  if (error != cudaSuccess || in.nq == 0) return error;
  count_rows<<<static_cast<unsigned>((in.nq + kThreads - 1) / kThreads), kThreads, 0, stream>>>(in, topk, counters);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
