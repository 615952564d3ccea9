// One slice of queries on its way through the stages on the device. Everything is enqueued; nothing waits.
#pragma once

#include "backend/backend.hpp"
#include "backend/cuda/stage_clock.hpp"
#include "backend/cuda/workspace.hpp"

namespace dosa::cuda {

/// What a run works on.
struct Run {
  const Plan& plan;
  Inputs given;  // as the caller gave them
  Inputs in;     // the same, or with pages gathered
  Arrays arrays;
  Selection out;
  Hints hints;   // none: ids is null
  bool screens_always;  // method dosa by name: a loose certificate is no reason not to screen
  int multiprocessors;
  cudaStream_t stream;
  StageClock* clock;  // null: stages are not timed
};

class CudaGroup final : public QueryGroup {
 public:
  CudaGroup(const Run& run, std::int64_t first_row);

  void seed() override;
  void certify() override;
  bool next_slice() override;
  void screen() override;
  void refine() override;
  void score_in_full() override;
  void select() override;

  /// The first launch that failed; what follows it was not launched.
  [[nodiscard]] cudaError_t error() const { return error_; }

 private:
  [[nodiscard]] ScopedLap lap(double Stats::* seconds) const { return {run_.clock, seconds, run_.stream}; }
  [[nodiscard]] Method method() const { return run_.plan.options.method; }
  [[nodiscard]] bool is_dosa() const { return screens(run_.plan); }
  [[nodiscard]] bool recalls() const { return cuda::recalls(run_.plan) && run_.hints.ids != nullptr; }
  [[nodiscard]] bool filters() const { return samples(run_.plan) || recalls(); }
  [[nodiscard]] RecordLists found() const;
  [[nodiscard]] OutputArgs output() const;
  [[nodiscard]] int sample_rank() const { return guessed_rank(topk_, sample_of(run_.in.nk).period); }
  [[nodiscard]] CertifyInputs certify_inputs() const;
  template <class Launch>
  void launch(const Launch& launch_stage);
  void recall();
  void take_sample();
  void guess_tau_from_sample();
  void expect_tau();
  void score_anchors();
  void choose_budgets();
  void take_witnesses();
  void refine_lists(const std::int32_t* count, const std::uint8_t* screened);
  void forget_tau();
  void forget_records();
  void select_records(int rank, Record* kept, std::int32_t* kept_count);
  void guess_tau();
  void score_pass(const Inputs& in, const KeySlice& keys, const Rows& pass, std::int64_t rows, int keep, Record* kept,
                  std::int32_t* kept_count, const OutputArgs& output);
  void filter_pass(const Rows& pass);
  void store_pass(Rows pass);
  Rows unscreened();

  const Run& run_;
  const Arrays& arrays_;
  std::int64_t first_row_;
  std::int64_t rows_;
  int topk_;
  int slice_ = -1;
  KeySlice keys_;  // of the slice
  cudaError_t error_ = cudaSuccess;
};

}  // namespace dosa::cuda
