// Fork and join: the one place where threads meet.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define DOSA_PLAIN_THREADS
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define DOSA_PLAIN_THREADS
#endif
#endif

#ifdef DOSA_PLAIN_THREADS
#include <thread>
#include <vector>
#else
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#endif

#include "base/fpenv.hpp"

namespace dosa {

/// Runs a body for workers 0..n-1, each once, at most `threads` at a time, in the floating-point environment that
/// scores are defined in; returns when all are done. Composes with the caller's own oneTBB work.
///
/// Built for the thread sanitizer it starts plain threads instead: packaged oneTBB is not instrumented, so the
/// sanitizer would not see how its tasks are ordered, and a suppression would hide our own races with them.
class ForkJoin {
 public:
#ifdef DOSA_PLAIN_THREADS
  explicit ForkJoin(int /*threads*/) {}

  template <class Body>
  void for_each_worker(int workers, const Body& body) const {
    std::vector<std::jthread> pool;
    for (int worker = 0; worker < workers; ++worker) pool.emplace_back([&body, worker] { run(body, worker); });
  }
#else
  explicit ForkJoin(int threads) : arena_(threads) {}

  template <class Body>
  void for_each_worker(int workers, const Body& body) const {
    if (workers == 1) return run(body, 0);  // no arena, whose first use allocates
    arena_.execute(
        [&] { tbb::parallel_for(0, workers, [&](int worker) { run(body, worker); }, tbb::simple_partitioner()); });
  }
#endif

 private:
  template <class Body>
  static void run(const Body& body, int worker) {
    const ScopedFloatEnvironment environment;
    body(worker);
  }

#ifndef DOSA_PLAIN_THREADS
  mutable tbb::task_arena arena_;
#endif
};

}  // namespace dosa
