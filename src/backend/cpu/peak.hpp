// The denominator of a CPU benchmark: how many f32 multiply-adds per second the threads can do at all.
#pragma once

namespace dosa::cpu {

/// Multiply-adds per second of `threads` threads at once, thread i on the i-th CPU this process may use: the best of several
/// bare loops with 8 to 12 independent accumulators of the widest vectors. Takes about `seconds`.
double peak_fma_rate(int threads, double seconds = 0.2);

}  // namespace dosa::cpu
