// A query's certificate from its ranking: section 3 of certificate/certificate.md, with the allowances of sections 4, 7
// and 9.
#pragma once

#include "backend/cuda/certify_rank.cuh"

namespace dosa::cuda {

/// What a certificate is, apart from its rows: the same on all threads.
struct Built {
  HeadSet retained;
  float sigma_high;
  float sigma_low;
  float c;  // not finite: no certificate
};

/// Is an omitted negative head in the aggregate, given the means of its positive and of its negative dots?
__device__ __forceinline__ bool is_aggregated(Ablation ablation, float on, float off) {
  return ablation == Ablation::all_aggregated || (ablation != Ablation::no_aggregate && on > off);
}

/// All threads. `total` is sum |w_h| ||q_h||. Leaves coefficients of retained heads and shares of all heads in
/// `shared`, the auxiliary pair in its rows.
template <int kHeads>
__device__ Built build(CertifyShared<kHeads>& shared, const CertifyInputs& inputs, int retained_count, double total) {
  using Shape = CertifyShape<kHeads>;
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  const bool base = inputs.base;
  const double allowances = inputs.allowances;
  const double g = allowances * hopper_head_sum(inputs.in.heads);
  const int given_up = max(shared.active - retained_count, 0);
  HeadSet retained = 0, positive = 0, negative = 0;
  for (int i = 0; i < shared.active; ++i) {
    const int h = shared.order[i];
    HeadSet& set = i >= given_up ? retained : shared.w[h] > 0 ? positive : negative;
    set |= HeadSet{1} << h;
  }
  __syncthreads();

  // Section 3: anchors. Section 4.1: weights take the rounding of the reference's head sum.
  int omitted = 0;
  for (HeadSet left = positive; left != 0; left &= left - 1, ++omitted) {
    if (omitted % Shape::kWarps != warp) continue;
    const int h = __ffsll(static_cast<long long>(left)) - 1;
    const int j = inputs.ablation == Ablation::no_projection ? -1 : best_anchor(shared, retained, h, base);
    if (lane == 0) {
      shared.list[omitted] = static_cast<std::uint8_t>(h);
      shared.anchor[h] = static_cast<std::int8_t>(j);
      shared.beta[h] = j < 0 ? 0.0F : shared.gram[h][j] / shared.gram[j][j];
      shared.heavier[h] = up_to_float(shared.w[h] * (1 + g));
    }
  }
  __syncthreads();
  if (t < kHeads) {
    double coefficient = 0, folded = 0;
    float share = 0, multiplier = 0;
    if (contains(retained, t)) {
      const double w = shared.w[t];
      for (int i = 0; i < omitted; ++i) {
        const int h = shared.list[i];
        if (shared.anchor[h] == t) folded += static_cast<double>(shared.heavier[h]) * fabsf(shared.beta[h]);
      }
      coefficient = (w > 0 ? w * (1 + g) : w * (1 - g)) + folded;
      share = base ? 0.0F : static_cast<float>(0.5 * folded);
      multiplier = __double2float_ru(folded);
    } else if (contains(positive, t)) {
      share = base ? 0.0F : -0.5F * shared.heavier[t];
      multiplier = shared.heavier[t];
    } else if (contains(negative, t) && is_aggregated(inputs.ablation, shared.on[t], shared.off[t])) {
      share = __double2float_rd(-static_cast<double>(shared.w[t]) * (1 - g));  // c_h a little below 1
      multiplier = share;
    }
    shared.coefficient[t] = coefficient;
    shared.share[t] = share;
    shared.multiplier[t] = multiplier;
    std::uint32_t largest = 0;  // an encoded magnitude
    for (int word = 0; word < kDim / 4; ++word) {
      const std::uint32_t bytes =
          reinterpret_cast<const std::uint32_t*>(shared.rows[t])[(word + t) % (kDim / 4)] & 0x7F7F7F7FU;
      largest = __vmaxu4(largest, bytes);
    }
    largest = max(max(largest & 0xFF, largest >> 8 & 0xFF), max(largest >> 16 & 0xFF, largest >> 24));
    shared.exponent[t] = exp2f(static_cast<float>(max(static_cast<int>(largest >> 3), 1) - 7));
  }
  if (t >= kHeads && t < Shape::kRows) shared.multiplier[t] = shared.exponent[t] = 0;
  __syncthreads();

  // Section 2, (3) and (4), with the error of section 4.5.
  double sums[8] = {};  // u.u absolute, signed; size T; leaned; then of the auxiliary pair
  for (int pair = t; pair < omitted * omitted; pair += Shape::kThreads) {
    const int h = shared.list[pair / omitted], l = shared.list[pair % omitted];
    const int j = shared.anchor[h] < 0 ? h : shared.anchor[h], m = shared.anchor[l] < 0 ? l : shared.anchor[l];
    const double beta_h = shared.beta[h], beta_l = shared.beta[l];
    const double to_head = shared.gram[h][l] - beta_h * shared.gram[j][l];
    const double to_anchor = shared.gram[h][m] - beta_h * shared.gram[j][m];
    const double product = static_cast<double>(shared.heavier[h]) * shared.heavier[l] * (to_head - beta_l * to_anchor);
    sums[0] += fabs(product);
    sums[1] += product;
  }
  if (t < omitted) {
    const int h = shared.list[t];
    const int j = shared.anchor[h] < 0 ? h : shared.anchor[h];
    sums[2] = shared.heavier[h] * (shared.norm[h] + fabs(static_cast<double>(shared.beta[h])) * shared.norm[j]);
  }
  if (t < kHeads) sums[3] = static_cast<double>(shared.multiplier[t]) * shared.norm[t];

  // Section 3: the auxiliary vector, component t. Its f32 chain is paid for below.
  float y = 0;
  for (int h = 0; h < kHeads; ++h) y = fmaf(shared.share[h], decode(shared.rows[h][t]), y);
  // Section 4.4 in FP8: two rows, and the length of what they leave.
  const auto take = [&](float& rest, int row) {
    const float largest = max_all(shared, fabsf(rest));
    float sigma = largest * (1.0F / 448);
    if (!(sigma > 0x1p-100F)) sigma = 0;
    const std::uint8_t byte = sigma > 0 ? encode(rest / sigma) : std::uint8_t{0};
    shared.rows[row][t] = byte;
    rest = fmaf(-sigma, decode(byte), rest);
    return sigma;
  };
  const double length = static_cast<double>(y) * y;
  Built out{};
  out.retained = retained;
  out.sigma_high = take(y, Shape::kHigh);
  out.sigma_low = take(y, Shape::kLow);
  const float high = decode(shared.rows[Shape::kHigh][t]), low = decode(shared.rows[Shape::kLow][t]);
  sums[4] = length;
  sums[5] = static_cast<double>(y) * y;
  sums[6] = static_cast<double>(high) * high;
  sums[7] = static_cast<double>(low) * low;
  sum_all(shared, sums);
  const double size = sums[2], leaned = sums[3];
  const double high_norm = sqrt(sums[6]) * (1 + 0x1p-40), low_norm = sqrt(sums[7]) * (1 + 0x1p-40);
  const float high_largest = max_all(shared, fabsf(high)), low_largest = max_all(shared, fabsf(low));
  if (t == 0) {
    const auto power = [](float x) {
      return x < 0x1p-6F ? 0x1p-6F : __uint_as_float(__float_as_uint(x) & 0x7F800000U);
    };
    shared.multiplier[Shape::kHigh] = out.sigma_high;
    shared.multiplier[Shape::kLow] = out.sigma_low;
    shared.exponent[Shape::kHigh] = power(high_largest);
    shared.exponent[Shape::kLow] = power(low_largest);
  }
  __syncthreads();

  // Section 7: prefix norms of all rows that need an allowance.
  constexpr int kSteps = kDim / kWgmmaStep;
  constexpr int kTilesAcross = kHeads / 8 + 1, kTiles = (kHeads / 16 + 1) * kTilesAcross;
  float prefix[kSteps] = {};
  for (int tile = warp; tile < kTiles; tile += Shape::kWarps) {
    const int row = tile / kTilesAcross * 16 + lane / 4, column = tile % kTilesAcross * 8;
    const float upper = shared.multiplier[row], lower = shared.multiplier[row + 8];
    const float left = shared.multiplier[column + lane % 4 * 2], right = shared.multiplier[column + lane % 4 * 2 + 1];
    float dot[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int d = step * kWgmmaStep; d < (step + 1) * kWgmmaStep; d += 16) {
        add_dots(dot, fragment(shared.rows[row], d), fragment(shared.rows[row + 8], d),
                 fragment(shared.rows[column + lane / 4], d));
      }
      prefix[step] += upper * (left * fabsf(dot[0]) + right * fabsf(dot[1])) +
                      lower * (left * fabsf(dot[2]) + right * fabsf(dot[3]));
    }
  }
  double wgmma[6];
  for (int step = 0; step < kSteps; ++step) wgmma[step] = prefix[step];
  wgmma[4] = wgmma[5] = 0;
  if (t < kHeads + 2) {
    const double norm = t < kHeads ? static_cast<double>(shared.norm[t]) : t == Shape::kHigh ? high_norm : low_norm;
    wgmma[4] = static_cast<double>(shared.multiplier[t]) * shared.exponent[t];
    wgmma[5] = static_cast<double>(shared.multiplier[t]) * fmax(norm, kSmallestExponent);
  }
  sum_all(shared, wgmma);

  if (t == 0) {
    double prefix_norm[kSteps];
    for (int step = 0; step < kSteps; ++step) {
      prefix_norm[step] = sqrt(wgmma[step] * (1 + 0x1p-16) + Shape::kPrefixError * wgmma[5] * wgmma[5]);
    }
    const double error = allowances * (Shape::kGramError + 0x1p-38) * size * size;
    const double root = sqrt(fmax(sums[0], 0.0) + error);
    HopperTerms terms;
    terms.residual = base ? 0.5 * (sqrt(fmax(sums[1], 0.0) + error) + root) : 0.5 * root;
    // The pair leaves y; forming the vector met at most kHeads + 1 roundings a component, splitting it two of its size.
    terms.lost = sqrt(sums[5]) * (1 + 0x1p-40) +
                 allowances * (gamma_n(kHeads + 2) * leaned + 0x1p-22 * sqrt(sums[4]) + 0x1p-130);
    terms.wgmma = wgmma_allowance(wgmma[4], wgmma[5], prefix_norm, kSteps).total();
    terms.pair = out.sigma_high * high_norm + out.sigma_low * low_norm;
    terms.magnitude = total + leaned;
    shared.constant = hopper_constant(terms, 11.313708498984761, allowances);
  }
  __syncthreads();
  out.c = up_to_float(shared.constant);
  return out;
}

}  // namespace dosa::cuda
