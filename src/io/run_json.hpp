// What a run reports, as JSON: the program's lines and the Python package's dictionaries have the same fields.
#pragma once

#include "dosa/indexer.hpp"
#include "explain.hpp"
#include "io/json.hpp"

namespace dosa {

JsonObject json_of(const ProblemShape& shape, std::size_t steps = 1);
JsonObject json_of(const Stats& stats);
JsonObject json_of(const Audit& audit);

/// Everything an explanation holds but the sampled keys one by one. `indexer_share`: of the prefill's time.
void add_explanation(JsonObject& line, const Explanation& explanation, double indexer_share);

}  // namespace dosa
