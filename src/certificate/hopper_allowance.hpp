// What the truncating sums of Hopper's FP8 tensor cores may lose in a dot product.
//
// Derivation: certificate.md, section 7. score/sm90.hpp emulates the arithmetic.
#pragma once

#include <span>

#include "certificate/hopper_bound.hpp"

namespace dosa {

/// Error of one dot of E4M3 rows q and k, over dim / 32 steps, is at most
/// wgmma_dot_error(dim) * max(||q||, 2^-6) * max(||k||, 2^-6). 135 * 2^-13, 1.65 %, for dim 128.
double wgmma_dot_error(int dim) noexcept;

/// Joint bound for all rows that need an allowance: omitted heads, the anchors' folded weight, auxiliary pairs. `rows`
/// [n, dim] holds E4M3 values. Never more than about the sum of the single bounds, usually a third less. Cost: O(n^2
/// dim).
WgmmaAllowance wgmma_joint_error(std::span<const float> rows, std::span<const double> multiplier, int dim);

}  // namespace dosa
