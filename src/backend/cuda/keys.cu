// keys: norms, inverse scales and the exempt mask, one pass over the keys.
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "backend/cuda/order.cuh"
#include "backend/cuda/prepare.hpp"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;                   // threads of a key, 16 bytes each
constexpr int kAtOnce = kThreads / kLanes;  // keys
constexpr float kSmallestScale =
    0x1p-40F;  // where 1 / alpha and what is multiplied by it neither overflow nor underflow
constexpr float kLargestScale = 0x1p20F;

// Sum of the squares of 16 components. Products of E4M3 values are exact in f32; a NaN byte gives NaN.
__device__ float sum_of_squares(const uint4& bytes) {
  float sum = 0;
  const std::uint32_t words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (const std::uint32_t word : words) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> (16 * half));
      const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      sum = fmaf(value.x, value.x, sum);
      sum = fmaf(value.y, value.y, sum);
    }
  }
  return sum;
}

// rho from a sum of non-negative terms in which each of them meets at most 19 roundings: 16 of a chain, 3 of a tree.
__device__ float norm_summary(float square) {
  constexpr double kWiden = 1 + 20 * 0x1p-24;
  return __double2float_ru(__dsqrt_ru(__dmul_ru(fmaxf(square, 0x1p-12F), kWiden / kDim)));
}

// A run of a slice a CTA: its 32 words of the mask are whole.
__global__ __launch_bounds__(kThreads) void keys_kernel(KeysArgs args) {
  __shared__ std::uint32_t exempt[kMaskRunWords];
  const std::int64_t run = blockIdx.x;
  const KeySlice slice = slice_of(args.nk, static_cast<int>(blockIdx.y), args.period);
  if (run * kMaskRun >= slice.count) return;
  if (threadIdx.x < kMaskRunWords) exempt[threadIdx.x] = 0;
  __syncthreads();
  const int part = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) / kLanes; i < kMaskRun; i += kAtOnce) {
    const std::int64_t in_slice = run * kMaskRun + i;
    const bool exists = in_slice < slice.count;
    const std::int64_t key = key_at(slice, in_slice), at_key = blockIdx.y * args.slice_stride + in_slice;
    const uint4 bytes = exists ? __ldg(reinterpret_cast<const uint4*>(args.k + key * kDim) + part) : uint4{};
    float square = sum_of_squares(bytes);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) square += __shfl_xor_sync(0xFFFFFFFFU, square, step);
    if (part != 0 || !exists) continue;
    const float alpha = __ldg(args.k_scale + key);
    const bool is_exempt = !(square >= 0) || !(alpha >= kSmallestScale && alpha <= kLargestScale);
    args.rho[at_key] = is_exempt ? __uint_as_float(0x7F800000U) : norm_summary(square);
    args.inv_alpha[at_key] = is_exempt ? 0.0F : __frcp_rn(alpha);
    if (is_exempt) {
      const MaskBit at = mask_bit(i);
      atomicOr(&exempt[at.word], 1U << at.bit);
    }
  }
  __syncthreads();
  if (threadIdx.x < kMaskRunWords) {
    const std::uint32_t word = exempt[threadIdx.x];
    args.exempt[(blockIdx.y * args.slice_stride / kMaskRun + run) * kMaskRunWords + threadIdx.x] = word;
    const std::uint32_t count = __reduce_add_sync(0xFFFFFFFFU, __popc(word));
    if (threadIdx.x == 0 && count != 0 && args.exempt_count != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.exempt_count), count);
    }
  }
}

// Eight lanes a key.
__global__ void __launch_bounds__(kThreads) gather_kernel(GatherArgs args) {
  const int i = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 8), part = static_cast<int>(threadIdx.x) % 8;
  if (i >= args.keys.count) return;
  const std::int64_t key = key_at(args.keys, i);
  reinterpret_cast<uint4*>(args.to_k)[i * 8 + part] = reinterpret_cast<const uint4*>(args.k)[key * 8 + part];
  if (part == 0) args.to_scale[i] = args.k_scale[key];
}

}  // namespace

cudaError_t launch_gather(const GatherArgs& args, cudaStream_t stream) {
  if (args.keys.count == 0) return cudaSuccess;
  constexpr int kKeys = kThreads / 8;
  gather_kernel<<<static_cast<unsigned>((args.keys.count + kKeys - 1) / kKeys), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_keys(const KeysArgs& args, cudaStream_t stream) {
  if (args.nk == 0) return cudaSuccess;
  const int runs = (slice_of(args.nk, 0, args.period).count + kMaskRun - 1) / kMaskRun;
  const dim3 grid(static_cast<unsigned>(runs), static_cast<unsigned>(args.period));
  keys_kernel<<<grid, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
