// The same question as check.hpp, asked of the cuda backend.
#pragma once

#include <gtest/gtest.h>

#include "dosa/indexer.hpp"

namespace dosa::test {

/// True if there is a GPU that the cuda backend has kernels for, and the problem has a shape that it takes.
bool gpu_takes(const Problem& problem);

/// Runs every method of the cuda backend twice on a copy of the problem, the workspace poisoned differently. Ids and score
/// bits must equal the oracle's over sm90 scores, for both orders and id spaces.
::testing::AssertionResult exact_on_gpu(const Problem& problem);

}  // namespace dosa::test
