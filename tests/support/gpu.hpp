// The same question as check.hpp, asked of the cuda backend.
#pragma once

#include <gtest/gtest.h>

#include "dosa/indexer.hpp"

namespace dosa::test {

/// True if there is a GPU that the cuda backend has kernels for.
bool have_gpu();

/// Runs the cuda backend on a copy of the problem, its dim widened to 128 with zeros, in a workspace that the last run left
/// dirty. Ids and score bits must equal the oracle's over sm90 scores, for all orders and id spaces, on as many rows as
/// the emulator of that arithmetic can do in a few seconds.
::testing::AssertionResult exact_on_gpu(const Problem& problem);

/// The same where there is a GPU.
void expect_exact_on_gpu(const Problem& problem);

}  // namespace dosa::test
