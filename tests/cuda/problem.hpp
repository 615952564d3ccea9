// Inputs of the device stages, made up on the host: plain ones, and ones that are meant to hurt.
#pragma once

#include <cmath>
#include <limits>
#include <random>

#include "backend/cuda/stages.hpp"
#include "cuda/device.hpp"
#include "score/quantize.hpp"
#include "score/reference.hpp"

namespace dosa::test {

struct DeviceProblem {
  int heads;
  std::int64_t nq;
  std::int64_t nk;
  std::int64_t w_stride;
  std::vector<std::uint8_t> q, k;
  std::vector<float> k_scale, w;
  std::vector<std::int32_t> ks, ke;

  /// Normal rows, quantised; w with a third positive; causal ranges with the queries at the end.
  static DeviceProblem plain(int heads, std::int64_t nq, std::int64_t nk, unsigned seed) {
    DeviceProblem p = shaped(heads, nq, nk);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    float row[cuda::kDim];
    const auto quantise = [&](std::uint8_t* to) {
      for (float& x : row) x = normal(random);
      return quantize_row(row, {to, cuda::kDim}, ScaleRule::amax);
    };
    for (std::int64_t i = 0; i < nq * heads; ++i) quantise(p.q.data() + i * cuda::kDim);
    for (std::int64_t i = 0; i < nk; ++i) p.k_scale[i] = quantise(p.k.data() + i * cuda::kDim);
    for (float& w : p.w) w = 0.01F * (normal(random) - 0.5F);
    for (std::int64_t i = 0; i < nq; ++i) {
      p.ks[i] = 0;
      p.ke[i] = static_cast<std::int32_t>(std::max<std::int64_t>(nk - nq + i + 1, 0));
    }
    return p;
  }

  /// Any bytes, NaN among them; rows of zeros; weights and scales that are zero, negative, subnormal, huge, infinite or
  /// NaN; ranges that are ragged, empty, negative or too long.
  static DeviceProblem hostile(int heads, std::int64_t nq, std::int64_t nk, unsigned seed) {
    DeviceProblem p = shaped(heads, nq, nk);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    constexpr float inf = std::numeric_limits<float>::infinity();
    const float special[] = {0.0F, -0.0F, 1e-42F, -1e-42F, 3e38F, -3e38F, inf, -inf, std::nanf(""), 1.0F};
    const auto bytes = [&](std::vector<std::uint8_t>& rows) {
      for (std::size_t i = 0; i < rows.size(); i += cuda::kDim) {
        const int kind = below(6);
        for (int d = 0; d < cuda::kDim; ++d) {
          auto byte = static_cast<std::uint8_t>(random());
          if (kind != 0 && (byte & 0x7F) == 0x7F) byte ^= 1;                      // NaN only in some rows
          if (kind == 1) byte &= 0x87;                                            // subnormals
          if (kind == 2) byte = below(40) == 0 ? byte : 0;                        // almost nothing
          if (kind == 3) byte = static_cast<std::uint8_t>(0x7E | (byte & 0x80));  // the largest
          if (kind == 4 && i % 3 == 0) byte = 0;
          rows[i + d] = byte;
        }
      }
    };
    bytes(p.q);
    bytes(p.k);
    const auto floats = [&](std::vector<float>& values, int rare) {
      for (float& v : values)
        v = below(rare) == 0 ? special[below(10)] : std::ldexp(static_cast<float>(below(2001) - 1000), below(20) - 10);
    };
    floats(p.k_scale, 8);
    floats(p.w, 40 * heads);
    for (std::int64_t i = 0; i < nq; ++i) {
      p.ks[i] = below(static_cast<int>(nk)) - 10;
      p.ke[i] = p.ks[i] + below(static_cast<int>(nk) + 40) - 20;
      if (i % 4 == 0) p.ke[i] = static_cast<std::int32_t>(nk) + 5;
      if (i % 5 == 1) p.ks[i] = -3;
      if (i % 7 == 6) p.ke[i] = p.ks[i];
    }
    return p;
  }

  [[nodiscard]] std::int64_t begin(std::int64_t query) const { return std::max<std::int64_t>(ks[query], 0); }
  [[nodiscard]] std::int64_t end(std::int64_t query) const { return std::min<std::int64_t>(ke[query], nk); }

  [[nodiscard]] QueryScorer scorer(std::int64_t query) const {
    const auto h = static_cast<std::size_t>(heads);
    return {ReferenceScorer::sm90,
            {q.data() + query * heads * cuda::kDim, h * cuda::kDim},
            {w.data() + query * w_stride, h}};
  }
  [[nodiscard]] float score(const QueryScorer& scorer, std::int64_t key) const {
    return scorer({k.data() + key * cuda::kDim, cuda::kDim}, k_scale[key]);
  }

 private:
  static DeviceProblem shaped(int heads, std::int64_t nq, std::int64_t nk) {
    DeviceProblem p{};
    p.heads = heads;
    p.nq = nq;
    p.nk = nk;
    p.w_stride = heads + 3;
    p.q.resize(nq * heads * cuda::kDim);
    p.k.resize(nk * cuda::kDim);
    p.k_scale.resize(nk);
    p.w.resize(nq * p.w_stride);
    p.ks.resize(nq);
    p.ke.resize(nq);
    return p;
  }
};

/// A problem's arrays on the device.
struct DeviceInputs {
  explicit DeviceInputs(const DeviceProblem& p)
      : q(p.q),
        k(p.k),
        k_scale(p.k_scale),
        w(p.w),
        ks(p.ks),
        ke(p.ke),
        inputs{.q = q.get(),
               .k = k.get(),
               .k_scale = k_scale.get(),
               .w = w.get(),
               .ks = ks.get(),
               .ke = ke.get(),
               .w_stride = p.w_stride,
               .nq = p.nq,
               .nk = p.nk,
               .heads = p.heads} {}
  DeviceArray<std::uint8_t> q, k;
  DeviceArray<float> k_scale, w;
  DeviceArray<std::int32_t> ks, ke;
  cuda::Inputs inputs;
};

/// Equal bits; all NaN are one value.
inline bool same_score(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

}  // namespace dosa::test
