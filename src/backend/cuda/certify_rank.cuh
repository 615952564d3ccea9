// Which heads of a query are worth a bound row: the elimination of certificate/heads.cpp on one warp, a head or two a
// lane.
//
// Advice only: the inequality holds for any retained set. What heads that lean on a given-up head lose is left out of
// its loss here, because it hardly ever decides.
#pragma once

#include "backend/cuda/certify.cuh"

namespace dosa::cuda {

using HeadSet = std::uint64_t;

__device__ __forceinline__ bool contains(HeadSet set, int head) { return (set >> head & 1) != 0; }

/// One warp: the heads for which `pred` holds, where lane l asks for heads l, l + 32.
template <int kHeads, class Predicate>
__device__ __forceinline__ HeadSet heads_where(const Predicate& pred) {
  HeadSet set = 0;
#pragma unroll
  for (int e = 0; e < CertifyShape<kHeads>::kEach; ++e) {
    set |= HeadSet{__ballot_sync(kAllLanes, pred(static_cast<int>(threadIdx.x) % 32 + 32 * e))} << (32 * e);
  }
  return set;
}

/// One warp: the head of `set` other than `head` that leaves least of it: the greatest |q_h . q_j| / ||q_j||, or of q_h
/// . q_j if only positive ones count. -1: none.
template <int kHeads>
__device__ __forceinline__ int best_anchor(const CertifyShared<kHeads>& shared, HeadSet set, int head, bool positive) {
  std::uint32_t best = 0;
  int best_e = 0;
#pragma unroll
  for (int e = 0; e < CertifyShape<kHeads>::kEach; ++e) {
    const int j = static_cast<int>(threadIdx.x) % 32 + 32 * e;
    const float dot = positive ? fmaxf(shared.gram[head][j], 0.0F) : fabsf(shared.gram[head][j]);
    const std::uint32_t value = contains(set, j) && j != head ? __float_as_uint(dot * shared.inverse_norm[j]) : 0;
    if (value > best) {
      best = value;
      best_e = e;
    }
  }
  const std::uint32_t most = __reduce_max_sync(kAllLanes, best);
  if (most == 0) return -1;
  const std::uint32_t lanes = __ballot_sync(kAllLanes, best == most);
  const int lane = __ffs(static_cast<int>(lanes)) - 1;
  return lane + 32 * __shfl_sync(kAllLanes, best_e, lane);
}

__device__ __forceinline__ float rough_root(float x) {
  asm("sqrt.approx.f32 %0, %0;" : "+f"(x));
  return x;
}

/// The first warp: the order in which heads are given up until `least` are left. Row p of z is u_p . q_l
/// of the omitted positive head p = w_p (q_p - beta_p q_anchor(p)).
template <int kHeads>
__device__ void rank_heads(CertifyShared<kHeads>& shared, int least) {
  using Shape = CertifyShape<kHeads>;
  constexpr int kEach = Shape::kEach;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float weight[kEach], magnitude[kEach], lesser[kEach], beta[kEach], linear[kEach], square[kEach], coupling[kEach];
  int anchor[kEach];
  double total = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int h = lane + 32 * e;
    total += fabs(static_cast<double>(shared.w[h])) * shared.norm[h];
  }
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  const HeadSet active = heads_where<kHeads>([&](int h) { return shared.w[h] != 0; });
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int h = lane + 32 * e;
    weight[e] =
        contains(active, h) ? static_cast<float>(shared.w[h] / total) : 0.0F;  // whatever the scale of the weights
    magnitude[e] = shared.on[h] + shared.off[h];
    lesser[e] = fminf(shared.on[h], shared.off[h]);
    anchor[e] = -1;
    beta[e] = linear[e] = square[e] = coupling[e] = 0;
  }

  HeadSet kept = active, omitted = 0;  // omitted: positive heads only
  HeadSet stale = heads_where<kHeads>([&](int h) { return contains(active, h) && shared.w[h] > 0; });
  float residual = 0;  // E'^2
  int given_up = 0;
  int count = __popcll(kept);
  std::uint32_t loss[kEach];  // of the mean bound, in an order of unsigned numbers
  bool changed = true;        // losses are others than in the last step
  while (true) {
    // Heads whose anchor was given up lean on their next one.
    HeadSet moved = stale & omitted;
    for (; stale != 0; stale &= stale - 1) {
      const int h = __ffsll(static_cast<long long>(stale)) - 1;
      const int j = best_anchor(shared, kept, h, false);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (h != lane + 32 * e) continue;
        anchor[e] = j;
        beta[e] = j < 0 ? 0.0F : shared.gram[h][j] * shared.inverse_norm[j] * shared.inverse_norm[j];
        const float on_anchor = j < 0 ? 0.0F : fabsf(beta[e]) * (shared.on[j] + shared.off[j]);
        linear[e] = 0.5F * weight[e] * (on_anchor - magnitude[e]);
        const float rest = shared.gram[h][h] - (j < 0 ? 0.0F : beta[e] * shared.gram[h][j]);
        square[e] = weight[e] * weight[e] * fmaxf(rest, 0.0F);
      }
    }
    // z of heads that are newly omitted or have moved.
    const HeadSet fresh = moved | (given_up > 0 ? omitted & (HeadSet{1} << shared.order[given_up - 1]) : 0);
    for (HeadSet left = fresh; left != 0; left &= left - 1) {
      const int p = __ffsll(static_cast<long long>(left)) - 1;
      float w = 0, b = 0;
      int j = -1;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (p / 32 != e) continue;
        w = __shfl_sync(kAllLanes, weight[e], p % 32);
        b = __shfl_sync(kAllLanes, beta[e], p % 32);
        j = __shfl_sync(kAllLanes, anchor[e], p % 32);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int l = lane + 32 * e;
        shared.z[p][l] = w * (shared.gram[p][l] - (j < 0 ? 0.0F : b * shared.gram[j][l]));
      }
    }
    __syncwarp();
    // Of every positive head: sum |u_p . d_h| over the omitted ones.
    if (omitted != 0 && changed) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        coupling[e] = 0;
        const int h = lane + 32 * e;
        const int j = anchor[e] < 0 ? h : anchor[e];
        for (HeadSet left = omitted; left != 0; left &= left - 1) {
          const float* row = shared.z[__ffsll(static_cast<long long>(left)) - 1];
          coupling[e] += fabsf(row[h] - beta[e] * row[j]);
        }
      }
      residual = 0;
#pragma unroll
      for (int e = 0; e < kEach; ++e) residual += contains(omitted, lane + 32 * e) ? weight[e] * coupling[e] : 0.0F;
      for (int step = 16; step > 0; step /= 2) residual += __shfl_xor_sync(kAllLanes, residual, step);
    }
    if (count <= least) break;

    // The least loss goes.
    if (changed) {
      const float root = rough_root(residual);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        float value = -weight[e] * lesser[e];
        if (weight[e] > 0) {
          const float grown = rough_root(fmaxf(residual + square[e] + 2 * weight[e] * coupling[e], 0.0F));
          value = linear[e] + 0.5F * shared.key_norm * (grown - root);
        }
        const std::uint32_t bits = __float_as_uint(value);
        loss[e] = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
      }
    }
    std::uint32_t least_loss = ~0U;
    int which = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (contains(kept, lane + 32 * e) && loss[e] < least_loss) {
        least_loss = loss[e];
        which = e;
      }
    }
    const std::uint32_t smallest = __reduce_min_sync(kAllLanes, least_loss);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, least_loss == smallest))) - 1;
    const int gone = owner + 32 * __shfl_sync(kAllLanes, which, owner);
    if (lane == 0) shared.order[given_up] = static_cast<std::uint8_t>(gone);
    __syncwarp();
    ++given_up;
    --count;
    kept &= ~(HeadSet{1} << gone);
    if (shared.w[gone] > 0) omitted |= HeadSet{1} << gone;
    HeadSet leaning = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      leaning |= HeadSet{__ballot_sync(kAllLanes, weight[e] > 0 && anchor[e] == gone)} << (32 * e);
    }
    stale = leaning;
    changed = leaning != 0 || shared.w[gone] > 0;
  }
  if (lane == 0) {
    for (HeadSet left = kept; left != 0; left &= left - 1) {
      shared.order[given_up++] = static_cast<std::uint8_t>(__ffsll(static_cast<long long>(left)) - 1);
    }
    shared.active = given_up;
  }
  __syncwarp();
}

}  // namespace dosa::cuda
