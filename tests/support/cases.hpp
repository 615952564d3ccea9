// Problems for tests: owned arrays, the families they are filled from, and the same problem behind awkward strides.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "dosa/problem.hpp"

namespace dosa::test {

using Random = std::mt19937_64;

/// A problem that owns dense arrays. ks, ke and hints are absent while empty.
struct Case {
  std::int64_t nq = 1;
  std::int64_t nk = 0;
  std::int32_t heads = 2;
  std::int32_t dim = 32;
  std::int32_t topk = 1;
  std::vector<std::uint8_t> q;  // [nq, heads, dim]
  std::vector<std::uint8_t> k;  // [nk, dim]
  std::vector<float> k_scale;   // [nk]
  std::vector<float> w;         // [nq, heads]
  std::vector<std::int32_t> ks, ke;
  std::vector<std::int32_t> hints;  // [1, m] or [nq, m]
  std::int64_t hint_rows = 1;

  [[nodiscard]] Problem problem() const;
};

/// Key i scores exactly scores[i] (any f32 but a NaN's payload) in every one of `nq` rows: head 0 = e0 with w = +1,
/// head 1 = e1 with w = -1, other heads are zero; the key has 1.0 in dimension 0 or 1, and k_scale = |score|.
Case explicit_scores(const std::vector<float>& scores, std::int32_t topk, std::int64_t nq = 1, std::int32_t heads = 2,
                     std::int32_t dim = 32);

struct Family {
  double positive = 0.5;      ///< share of heads with positive weight
  double correlation = 0.3;   ///< of a head with the direction that all heads share
  double alignment = 0.3;     ///< of keys with that direction, so that scores are not all alike
  double scale_spread = 0.5;  ///< standard deviation of log k_scale
};

/// Gaussian activations, quantised.
Case random_case(std::uint64_t seed, std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim,
                 std::int32_t topk, const Family& family = {});

/// Rows that see 0..position like the last nq positions of a sequence of nk keys.
void make_causal(Case& c);

/// Ranges that are empty, reversed, negative, beyond the end or plain.
void make_ragged(Case& c, std::uint64_t seed);

/// The same problem in arrays of random axis order, direction, innermost step and padding; poison lies between the
/// elements.
class StridedCase {
 public:
  StridedCase(const Case& c, std::uint64_t seed);
  [[nodiscard]] const Problem& problem() const { return problem_; }

 private:
  template <typename T>
  TensorView scatter(const std::vector<T>& dense, std::vector<std::int64_t> shape, DType dtype, T poison);

  Random random_;
  std::vector<std::shared_ptr<void>> arrays_;
  Problem problem_;
};

}  // namespace dosa::test
