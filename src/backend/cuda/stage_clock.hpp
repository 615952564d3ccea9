// Times of stages by events on the stream, for benchmarks.
#pragma once

#include <vector>

#include <cuda_runtime_api.h>

#include "dosa/result.hpp"

namespace dosa::cuda {

class StageClock {
 public:
  StageClock() = default;
  StageClock(const StageClock&) = delete;
  StageClock& operator=(const StageClock&) = delete;
  ~StageClock() {
    for (const Lap& lap : laps_) cudaEventDestroy(lap.start), cudaEventDestroy(lap.stop);
  }

  void start(double Stats::* seconds, cudaStream_t stream) {
    Lap lap{seconds, nullptr, nullptr};
    cudaEventCreate(&lap.start);
    cudaEventCreate(&lap.stop);
    cudaEventRecord(lap.start, stream);
    laps_.push_back(lap);
  }
  void stop(cudaStream_t stream) { cudaEventRecord(laps_.back().stop, stream); }

  /// Waits for the stream.
  cudaError_t read(cudaStream_t stream, Stats& stats) const {
    cudaError_t error = cudaStreamSynchronize(stream);
    for (const Lap& lap : laps_) {
      float milliseconds = 0;
      if (error == cudaSuccess) error = cudaEventElapsedTime(&milliseconds, lap.start, lap.stop);
      stats.*lap.seconds += 1e-3 * static_cast<double>(milliseconds);
    }
    return error;
  }

 private:
  struct Lap {
    double Stats::* seconds;
    cudaEvent_t start, stop;
  };
  std::vector<Lap> laps_;
};

/// The lap of a scope; nothing without a clock.
class ScopedLap {
 public:
  ScopedLap(StageClock* clock, double Stats::* seconds, cudaStream_t stream) : clock_(clock), stream_(stream) {
    if (clock_ != nullptr) clock_->start(seconds, stream_);
  }
  ScopedLap(const ScopedLap&) = delete;
  ScopedLap& operator=(const ScopedLap&) = delete;
  ~ScopedLap() {
    if (clock_ != nullptr) clock_->stop(stream_);
  }

 private:
  StageClock* clock_;
  cudaStream_t stream_;
};

}  // namespace dosa::cuda
