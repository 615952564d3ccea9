// The oracle: score every visible key with plain scalar code, sort everything. Slow and obvious on purpose.
#pragma once

#include <cstdint>
#include <vector>

#include "dosa/options.hpp"
#include "dosa/problem.hpp"
#include "score/reference.hpp"

namespace dosa {

struct OracleRow {
  std::vector<std::int32_t> ids;  // [K], -1 padded
  std::vector<float> scores;      // [K], reference score bits of ids (NaN as 0x7FC00000), -inf where ids is -1
};

/// The exact selection of query `row`. `problem` must be valid (Indexer::run checks; this does not).
OracleRow oracle_row(const Problem& problem, std::int64_t row, ReferenceScorer scorer, Order order, IndexSpace space);

/// Exact dot of two E4M3 rows, in units of 2^-18 (an integer below 2^43). Neither row may hold NaN bytes.
std::int64_t exact_dot(const std::uint8_t* a, const std::uint8_t* b, int dim);

}  // namespace dosa
