// One query's certificate on a CTA: the steps of certificate/certificate.cpp for the extended and base forms with a
// linear auxiliary vector, as FP8 rows. Section numbers are those of certificate/certificate.md.
#pragma once

#include <cstdint>

#include "backend/cuda/order.cuh"
#include "backend/cuda/prepare.hpp"
#include "certificate/hopper_bound.hpp"

namespace dosa::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// `kHeads`: 32 or 64; further ones are padded with zero rows of zero weight, which drop out.
template <int kHeads_>
struct CertifyShape {
  static constexpr int kHeads = kHeads_;
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kEach = kHeads / 32;  // heads of a lane, 32 apart
  static constexpr int kPanel = 128;         // sampled keys, one a thread
  static constexpr int kFocusShare = 4;      // the best quarter of them are the keys that matter
  static constexpr int kFewestKeys = 32;     // fewer are no sample
  static constexpr int kBytes = kDim + 16;   // bytes of an encoded row: 4-byte loads of 8 rows meet no bank twice
  static constexpr int kRows = kHeads + 16;  // heads, high, low, zero rows up to a whole tile
  static constexpr int kHigh = kHeads;
  static constexpr int kLow = kHeads + 1;
  static constexpr double kGramError = 36 * 0x1p-24 * (1 + 0x1p-18);  // gamma: chains of 32, four of them summed
  // Tensor cores sum exact f16 products in f32; that they keep 14 bits is all that is asked of them here.
  static constexpr double kPrefixError = 0x1p-14;
};

template <int kHeads>
struct CertifyShared {
  using Shape = CertifyShape<kHeads>;
  alignas(16) std::uint8_t rows[Shape::kRows][Shape::kBytes];  // encoded heads, then the auxiliary pair
  float gram[kHeads][kHeads + 1];
  float z[kHeads][kHeads + 1];  // of the elimination
  std::int32_t panel[Shape::kPanel];  // keys
  float panel_alpha[Shape::kPanel];  // 0 for keys that are exempt or absent
  float panel_rho[Shape::kPanel];
  alignas(16) float panel_score[Shape::kPanel];
  std::uint32_t focus[Shape::kWarps];
  std::int32_t panel_keys;

  // Per head.
  float w[kHeads];
  float norm[kHeads];  // >= ||q_h||
  float inverse_norm[kHeads];
  float on_part[Shape::kWarps][kHeads], off_part[Shape::kWarps][kHeads];
  float on[kHeads];       // mean of [x_h]+ over the focus keys
  float off[kHeads];      // mean of [-x_h]+
  float heavier[kHeads];  // w_h (1 + g), rounded up, of an omitted positive head
  float beta[kHeads];
  std::int8_t anchor[kHeads];      // -1: none
  float share[kHeads];             // auxiliary vector = sum of share q
  double coefficient[kHeads];      // v of a retained head
  float multiplier[Shape::kRows];  // of what needs a wgmma allowance
  float exponent[Shape::kRows];    // 2^Emax
  std::uint8_t order[kHeads];      // heads in the order in which they are given up; the kept ones last
  std::uint8_t list[kHeads];       // omitted positive heads, or retained ones

  double sums[8][Shape::kWarps];
  float extremes[Shape::kWarps];
  int active;      // heads that can contribute
  float key_norm;  // mean over the focus keys
  double constant;
};

// ---------------------------------------------------------------------------------------------------------- small
// change

__device__ __forceinline__ float2 decode_pair(std::uint32_t two_bytes) {
  std::uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<std::uint16_t>(two_bytes)));
  float2 value;
  asm("{.reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(value.x), "=f"(value.y)
      : "r"(half2));
  return value;
}

/// Four consecutive components as two pairs of f16.
__device__ __forceinline__ uint2 halves_of(std::uint32_t four_bytes) {
  uint2 out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out.x) : "h"(static_cast<std::uint16_t>(four_bytes)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out.y) : "h"(static_cast<std::uint16_t>(four_bytes >> 16)));
  return out;
}

__device__ __forceinline__ std::uint8_t encode(float value) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0F), "f"(value));
  return static_cast<std::uint8_t>(pair);
}

__device__ __forceinline__ float decode(std::uint8_t byte) { return decode_pair(byte).x; }

/// d += 16 rows x 16 components times 16 components x 8 rows.
__device__ __forceinline__ void add_dots(float (&d)[4], uint2 upper, uint2 lower, uint2 other) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(other.x), "r"(other.y));
}

/// Components 4 c .. 4 c + 3 of the 16 from `first` on, of an encoded row: as good a place for them in a fragment as
/// any, because both operands have them there.
__device__ __forceinline__ uint2 fragment(const std::uint8_t* row, int first) {
  return halves_of(*reinterpret_cast<const std::uint32_t*>(row + first + static_cast<int>(threadIdx.x) % 4 * 4));
}

/// All threads: `count` sums over the CTA, in a fixed order.
template <int kCount, class Shared>
__device__ __forceinline__ void sum_all(Shared& shared, double (&value)[kCount]) {
  static_assert(kCount <= 8);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    for (int step = 16; step > 0; step /= 2) value[i] += __shfl_xor_sync(kAllLanes, value[i], step);
    if (threadIdx.x % 32 == 0) shared.sums[i][threadIdx.x / 32] = value[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    value[i] = 0;
    for (int warp = 0; warp < Shared::Shape::kWarps; ++warp) value[i] += shared.sums[i][warp];
  }
}

template <class Shared>
__device__ __forceinline__ float max_all(Shared& shared, float value) {
  __syncthreads();
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  if (threadIdx.x % 32 == 0) shared.extremes[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < Shared::Shape::kWarps; ++warp) value = fmaxf(value, shared.extremes[warp]);
  return value;
}

// ------------------------------------------------------------------------------------------------------------- the
// panel

/// All threads: keys spread evenly over what all screened rows of the group see. 0 keys: no sample.
template <int kHeads>
__device__ void load_panel(CertifyShared<kHeads>& shared, const CertifyInputs& args, std::int64_t first,
                           std::int64_t end) {
  using Shape = CertifyShape<kHeads>;
  std::int64_t begin = 0, stop = args.in.nk;
  for (std::int64_t r = first; r < end; ++r) {
    if (!(args.tau[r] >= -3.4028235e38F)) continue;
    const Visible visible = visible_keys(args.in, args.first_row + r);
    begin = max(begin, visible.begin);
    stop = min(stop, visible.end);
  }
  const int count =
      stop - begin < Shape::kFewestKeys ? 0 : static_cast<int>(min(std::int64_t{Shape::kPanel}, stop - begin));
  const int i = static_cast<int>(threadIdx.x);
  float alpha = 0, rho = 0;
  std::int64_t key = 0;
  if (i < count) {
    key = begin + (2 * i + 1) * (stop - begin) / (2 * count);
    const std::int64_t at = key % args.period * args.slice_stride + key / args.period;
    const float inverse = args.inv_alpha[at];
    if (inverse != 0) {
      alpha = args.in.k_scale[key];
      rho = args.rho[at];
    }
  }
  shared.panel[i] = static_cast<std::int32_t>(key);
  shared.panel_alpha[i] = alpha;
  shared.panel_rho[i] = rho;
  if (i == 0) shared.panel_keys = count;
  __syncthreads();
}

// -------------------------------------------------------------------------------------------------------------- the
// heads

/// All threads: the query's rows and weights. False if a weight is not finite or a byte is NaN.
template <int kHeads>
__device__ bool load_heads(CertifyShared<kHeads>& shared, const CertifyInputs& args, std::int64_t r) {
  using Shape = CertifyShape<kHeads>;
  const std::int64_t query = args.first_row + r;
  const int heads = args.in.heads;
  const auto* q = reinterpret_cast<const uint4*>(args.in.q + query * heads * kDim);
  bool bad = false;
  for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDim / 16; i += Shape::kThreads) {
    const int head = i / (kDim / 16), part = i % (kDim / 16);
    const uint4 bytes = head < heads ? q[i] : uint4{};
    reinterpret_cast<uint4*>(shared.rows[head])[part] = bytes;
    const std::uint32_t words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 low = decode_pair(words[j]), high = decode_pair(words[j] >> 16);
      bad = bad || !(low.x + low.y + high.x + high.y < 1e30F);
    }
  }
  if (threadIdx.x < kHeads) {
    const float w = static_cast<int>(threadIdx.x) < heads ? args.in.w[query * args.in.w_stride + threadIdx.x] : 0.0F;
    shared.w[threadIdx.x] = w;
    bad = bad || !(fabsf(w) <= 3.4028235e38F);
  }
  return __syncthreads_or(bad) == 0;
}

__device__ __forceinline__ float4 decode_four(const std::uint8_t* bytes) {
  const std::uint32_t four = *reinterpret_cast<const std::uint32_t*>(bytes);
  const float2 low = decode_pair(four), high = decode_pair(four >> 16);
  return {low.x, low.y, high.x, high.y};
}

/// All threads: the Gram matrix, by f32 chains over 32 components, four of them summed.
template <int kHeads>
__device__ void form_gram(CertifyShared<kHeads>& shared) {
  using Shape = CertifyShape<kHeads>;
  constexpr int kColumns = kHeads / 4;                // threads side by side; each has columns kColumns apart
  constexpr int kBands = Shape::kThreads / kColumns;  // threads one above the other
  constexpr int kTall = kHeads / kBands;              // rows of a thread, kBands apart
  const int column = static_cast<int>(threadIdx.x) % kColumns, band = static_cast<int>(threadIdx.x) / kColumns;
  float sum[kTall][4] = {};
#pragma unroll 1
  for (int step = 0; step < kDim; step += kWgmmaStep) {
    float part[kTall][4] = {};
#pragma unroll 2
    for (int d = step; d < step + kWgmmaStep; d += 4) {
      float4 right[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        right[j] = decode_four(shared.rows[column + j * kColumns] + d);
      }
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
        const float4 left = decode_four(shared.rows[band + i * kBands] + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          part[i][j] = fmaf(left.x, right[j].x, part[i][j]);
          part[i][j] = fmaf(left.y, right[j].y, part[i][j]);
          part[i][j] = fmaf(left.z, right[j].z, part[i][j]);
          part[i][j] = fmaf(left.w, right[j].w, part[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] += part[i][j];
    }
  }
#pragma unroll
  for (int i = 0; i < kTall; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) shared.gram[band + i * kBands][column + j * kColumns] = sum[i][j];
  }
  __syncthreads();
}

/// All threads, section 1: norms. Returns sum |w_h| ||q_h||, the same on all threads.
template <int kHeads>
__device__ double measure_heads(CertifyShared<kHeads>& shared) {
  using Shape = CertifyShape<kHeads>;
  const int h = static_cast<int>(threadIdx.x);
  double total[1] = {0};
  if (h < kHeads) {
    const double square = shared.gram[h][h];
    const float norm = __double2float_ru(__dsqrt_ru(square * (1 + 2 * Shape::kGramError)));
    const bool counts = shared.w[h] != 0 && square != 0;
    shared.norm[h] = counts ? norm : 0.0F;
    shared.inverse_norm[h] = counts ? 1.0F / norm : 0.0F;
    if (!counts) shared.w[h] = 0;
    total[0] = fabs(static_cast<double>(shared.w[h])) * shared.norm[h];
  }
  sum_all(shared, total);
  return total[0];
}

/// All threads: dots of all heads with the warp's 32 sampled keys. Lane 4 g + c holds heads 16 m + g (elements 0, 1)
/// and + 8 (2, 3), keys 8 n + 2 c and + 1.
template <int kHeads>
__device__ __forceinline__ void panel_dots(const CertifyShared<kHeads>& shared, const std::uint8_t* k, float (&x)[kHeads / 16][4][4]) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, keys = static_cast<int>(threadIdx.x) / 32 * 32;
  const std::uint8_t* key_row[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) key_row[n] = k + std::int64_t{shared.panel[keys + n * 8 + g]} * kDim;
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      for (float& value : x[m][n]) value = 0;
    }
  }
#pragma unroll 2
  for (int d = 0; d < kDim; d += 16) {
    uint2 key[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) key[n] = fragment(key_row[n], d);
#pragma unroll
    for (int m = 0; m < kHeads / 16; ++m) {
      const uint2 upper = fragment(shared.rows[m * 16 + g], d), lower = fragment(shared.rows[m * 16 + 8 + g], d);
#pragma unroll
      for (int n = 0; n < 4; ++n) add_dots(x[m][n], upper, lower, key[n]);
    }
  }
}

/// All threads: what the best-scoring quarter of the sampled keys says of each head, and the mean norm of those keys.
template <int kHeads>
__device__ void gather_statistics(CertifyShared<kHeads>& shared, const std::uint8_t* k) {
  using Shape = CertifyShape<kHeads>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = lane / 4,
            c = lane % 4;
  float x[kHeads / 16][4][4];
  panel_dots(shared, k, x);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float score = 0;
#pragma unroll
      for (int m = 0; m < kHeads / 16; ++m) {
        score = fmaf(shared.w[m * 16 + g], fmaxf(x[m][n][e], 0.0F), score);
        score = fmaf(shared.w[m * 16 + 8 + g], fmaxf(x[m][n][2 + e], 0.0F), score);
      }
      for (int step = 4; step < 32; step *= 2) score += __shfl_xor_sync(kAllLanes, score, step);
      const int key = warp * 32 + n * 8 + 2 * c + e;
      if (g == 0) shared.panel_score[key] = shared.panel_alpha[key] > 0 ? score * shared.panel_alpha[key] : -INFINITY;
    }
  }
  __syncthreads();

  // A key matters if fewer than a quarter of the keys come before it.
  const int i = static_cast<int>(threadIdx.x);
  const float mine = shared.panel_score[i];
  int before = 0;
#pragma unroll 4
  for (int j = 0; j < Shape::kPanel; j += 4) {
    const float4 other = *reinterpret_cast<const float4*>(shared.panel_score + j);
    before += (other.x > mine || (other.x == mine && j < i)) ? 1 : 0;
    before += (other.y > mine || (other.y == mine && j + 1 < i)) ? 1 : 0;
    before += (other.z > mine || (other.z == mine && j + 2 < i)) ? 1 : 0;
    before += (other.w > mine || (other.w == mine && j + 3 < i)) ? 1 : 0;
  }
  const int wanted = (shared.panel_keys + Shape::kFocusShare - 1) / Shape::kFocusShare;
  const bool matters = before < wanted && shared.panel_alpha[i] > 0;
  const std::uint32_t focus = __ballot_sync(kAllLanes, matters);
  double sums[2] = {matters ? 1.0 : 0.0, matters ? static_cast<double>(shared.panel_rho[i]) : 0.0};

#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float on = 0, off = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = (focus >> (n * 8 + 2 * c + e) & 1) != 0 ? x[m][n][2 * row + e] : 0.0F;
          on += fmaxf(value, 0.0F);
          off += fmaxf(-value, 0.0F);
        }
      }
      for (int step = 1; step < 4; step *= 2) {
        on += __shfl_xor_sync(kAllLanes, on, step);
        off += __shfl_xor_sync(kAllLanes, off, step);
      }
      if (c == 0) {
        shared.on_part[warp][m * 16 + row * 8 + g] = on;
        shared.off_part[warp][m * 16 + row * 8 + g] = off;
      }
    }
  }
  sum_all(shared, sums);
  const float each = 1.0F / fmaxf(static_cast<float>(sums[0]), 1.0F);
  if (i < kHeads) {
    float on = 0, off = 0;
    for (int w = 0; w < Shape::kWarps; ++w) {
      on += shared.on_part[w][i];
      off += shared.off_part[w][i];
    }
    shared.on[i] = on * each;
    shared.off[i] = off * each;
  }
  if (i == 0) shared.key_norm = sums[0] > 0 ? static_cast<float>(sums[1]) * each * sqrtf(kDim) : 1.0F;
  __syncthreads();
}

}  // namespace dosa::cuda
