// The one question that most tests ask: does a run give exactly what the oracle gives, and touch nothing else?
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dosa/indexer.hpp"
#include "score/oracle.hpp"

namespace dosa::test {

/// The exact selection of every row, best first, absolute ids.
std::vector<OracleRow> expected_rows(const Problem& problem);

/// Runs `options` with poisoned workspace and output rows apart, then for ids only with the Indexer's own workspace and
/// other poison. Ids and score bits must equal `expected` (rearranged for order and index space), guards around and
/// between output rows and around the workspace must be unchanged, and the counts in Stats must add up.
::testing::AssertionResult exact(const Problem& problem, const std::vector<OracleRow>& expected, const Options& options,
                                 Stats* stats = nullptr);

/// Every method on the fastest implementation with two threads, and the two that differ most on the scalar one with
/// one.
std::vector<Options> every_method();

/// `exact` for each of `options`, and on the GPU if there is one, reported through EXPECT.
void expect_exact(const Problem& problem, const std::vector<Options>& options = every_method());

/// Ids and scores of one run, best first unless options say otherwise; a failure is reported through ADD_FAILURE.
std::vector<OracleRow> select(const Problem& problem, const Options& options);

std::string describe(const Options& options);

}  // namespace dosa::test
