#include "backend/cpu/peak.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

// The targets that kernels.cpp compiles.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/peak.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dosa::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// `rounds` times 12 (or 8) independent multiply-adds of a whole vector; returns how many scalar multiply-adds that was.
template <int kAccumulators>
HWY_NOINLINE double run_loop(long rounds, float* sink) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V a = hn::Set(d, 0.999F), b = hn::Set(d, 1e-3F);
  // Different chains, or the compiler would compute one of them only.
  const auto start = [&](float value) HWY_ATTR { return hn::Set(d, value); };
  V s0 = start(0), s1 = start(1), s2 = start(2), s3 = start(3), s4 = start(4), s5 = start(5), s6 = start(6), s7 = start(7);
  V s8 = start(8), s9 = start(9), s10 = start(10), s11 = start(11);
  for (long i = 0; i < rounds; ++i) {
    s0 = hn::MulAdd(s0, a, b), s1 = hn::MulAdd(s1, a, b), s2 = hn::MulAdd(s2, a, b), s3 = hn::MulAdd(s3, a, b);
    s4 = hn::MulAdd(s4, a, b), s5 = hn::MulAdd(s5, a, b), s6 = hn::MulAdd(s6, a, b), s7 = hn::MulAdd(s7, a, b);
    if constexpr (kAccumulators >= 10) s8 = hn::MulAdd(s8, a, b), s9 = hn::MulAdd(s9, a, b);
    if constexpr (kAccumulators >= 12) s10 = hn::MulAdd(s10, a, b), s11 = hn::MulAdd(s11, a, b);
  }
  const V low = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)));
  *sink = hn::GetLane(hn::Add(low, hn::Add(hn::Add(s8, s9), hn::Add(s10, s11))));
  return static_cast<double>(rounds) * kAccumulators * static_cast<double>(hn::Lanes(d));
}

double run_eight(long rounds, float* sink) { return run_loop<8>(rounds, sink); }
double run_ten(long rounds, float* sink) { return run_loop<10>(rounds, sink); }
double run_twelve(long rounds, float* sink) { return run_loop<12>(rounds, sink); }

}  // namespace dosa::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dosa::cpu {

HWY_EXPORT(run_eight);
HWY_EXPORT(run_ten);
HWY_EXPORT(run_twelve);

namespace {

using Loop = double (*)(long, float*);

void pin_to(int nth) {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || nth-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
#else
  (void)nth;
#endif
}

// All threads at once: cores that share a power budget must not be measured alone.
double rate_of(Loop loop, int threads, double seconds) {
  std::vector<double> rates(static_cast<std::size_t>(threads));
  std::atomic<int> waiting{threads};
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      using Clock = std::chrono::steady_clock;
      pin_to(i);
      float sink = 0;
      loop(1000, &sink);
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      // All of the time counts, as it does for a method: what neighbours on the machine take (a sibling hyperthread of a
      // virtual machine's host can take a quarter, unseen) is taken from both.
      const auto start = Clock::now();
      double done = 0;
      double elapsed = 0;
      while (elapsed < seconds) {
        done += loop(50'000, &sink);
        elapsed = std::chrono::duration<double>(Clock::now() - start).count();
      }
      rates[static_cast<std::size_t>(i)] = std::isfinite(sink) ? done / elapsed : 0.0;
    });
  }
  double sum = 0;
  for (int i = 0; i < threads; ++i) {
    workers[static_cast<std::size_t>(i)].join();
    sum += rates[static_cast<std::size_t>(i)];
  }
  return sum;
}

}  // namespace

double peak_fma_rate(int threads, double seconds) {
  const Loop loops[] = {HWY_DYNAMIC_DISPATCH(run_eight), HWY_DYNAMIC_DISPATCH(run_ten), HWY_DYNAMIC_DISPATCH(run_twelve)};
  double best = 0;
  for (const Loop loop : loops) best = std::max(best, rate_of(loop, threads, seconds / 3));
  return best;
}

}  // namespace dosa::cpu
#endif
