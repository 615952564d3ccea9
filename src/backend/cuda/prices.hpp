// What the device stages cost, in picoseconds as measured on an H200 at 16K queries x 1M keys (bench/h200): only ratios
// matter.
#pragma once

#include "backend/cuda/layout.hpp"

namespace dosa::cuda {

/// One query-key pair scored in full, and the selection over its stored score.
constexpr double score_price(int heads) { return 1.0 + 0.22 * padded_heads(heads); }
inline constexpr double kSelectPrice = 0.95;

/// One bound row against one key.
inline constexpr double kBoundRowPrice = 0.24;

/// One gathered key: compacted, scored in full, recorded, selected.
constexpr double survivor_price(int heads) { return 38.0 + 0.2 * padded_heads(heads); }

/// One query's certificate: heads are ranked by sums over pairs of them.
constexpr double certificate_price(int heads) { return padded_heads(heads) <= 32 ? 7e4 : 2.2e5; }

}  // namespace dosa::cuda
