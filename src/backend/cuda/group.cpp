#include "backend/cuda/group.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cuda/prices.hpp"

namespace dosa::cuda {
namespace {

constexpr std::int64_t kGroupRows = 4096;  // rows that get the same budget: 64 sampled queries
constexpr int kGuessSlices = 3;            // tau is guessed after the first slice and after so many
constexpr double kWorthwhile = 0.8;        // of dense: what `automatic` asks of a prediction, which does not know every cost

}  // namespace

CudaGroup::CudaGroup(const Run& run, std::int64_t first_row)
    : run_(run),
      arrays_(run.arrays),
      first_row_(first_row),
      rows_(std::min<std::int64_t>(run.plan.tile_queries, run.in.nq - first_row)),
      topk_(run.plan.shape.topk) {}

template <class Launch>
void CudaGroup::launch(const Launch& launch_stage) {
  if (error_ == cudaSuccess) error_ = launch_stage();
}

void CudaGroup::seed() {
  if (method() == Method::dense) return;
  const ScopedLap timed = lap(&Stats::seconds_seed);
  if (scores_pages(run_.plan.shape)) return recall();
  launch([&] { return cudaMemsetAsync(arrays_.lost, 0, static_cast<std::size_t>(rows_), run_.stream); });
  forget_records();
  if (samples(run_.plan)) {
    take_sample();
    if (is_dosa()) choose_budgets();
    guess_tau_from_sample();
  } else if (run_.plan.options.seeds == SeedPolicy::nearest_spread) {
    launch([&] { return cudaMemsetAsync(arrays_.budget, 1, static_cast<std::size_t>(rows_), run_.stream); });
    take_witnesses();
    choose_budgets();
  } else {
    // The anchors' winners are exact, so their K-th score is too: rows whose certificate would reject too little even then are
    // not worth witnesses.
    score_anchors();
    choose_budgets();
    take_witnesses();
  }
}

// What neighbouring steps choose is mostly the same.
void CudaGroup::recall() {
  if (!recalls()) return;
  launch([&] {
    return launch_witness({.in = run_.in,
                           .first_row = first_row_,
                           .rows = rows_,
                           .topk = topk_,
                           .hints = run_.hints,
                           .found = found(),
                           .codes = arrays_.codes,
                           .code_stride = most_hints(topk_),
                           .done = arrays_.done,
                           .tau = arrays_.tau},
                          run_.stream);
  });
}

// Kept: the best of the sample, down to the rank that tau is guessed from.
void CudaGroup::take_sample() {
  const KeySlice sample = sample_of(run_.in.nk);
  Inputs in = run_.in;
  in.k = arrays_.sample_k;
  in.k_scale = arrays_.sample_scale;
  for (Rows pass; pass.first < rows_; pass.first += run_.plan.full_queries) {
    score_pass(in, sample, pass, std::min<std::int64_t>(run_.plan.full_queries, rows_ - pass.first), sample_rank(), arrays_.kept,
               arrays_.kept_count, {});
  }
}

// The score that K keys are expected to reach, and some more for safety. It proves nothing unless K keys of the sample reach it,
// so check_tau() looks at the outcome. Rows that see too few keys for a guess have a tau of -inf.
void CudaGroup::guess_tau_from_sample() {
  launch([&] { return launch_tau({rows_, sample_rank(), arrays_.kept, arrays_.kept_count, arrays_.tau}, run_.stream); });
}

// Budgets are chosen by the tau of the last guess, which most keys meet: its rank is known beforehand.
void CudaGroup::expect_tau() {
  const int slices = run_.plan.key_slices;
  if (slices == 1) return guess_tau_from_sample();
  const double step = std::max(1.0, slices / static_cast<double>(kGuessSlices));
  const int rank = static_cast<int>(std::ceil(guessed_rank(topk_, step) * step / sample_of(run_.in.nk).period));
  launch([&] {
    return launch_select_records({.rows = rows_,
                                  .records = arrays_.kept,
                                  .record_stride = sample_rank(),
                                  .record_count = arrays_.kept_count,
                                  .topk = rank,
                                  .kept = arrays_.guess_kept,
                                  .kept_count = arrays_.guess_count},
                                 run_.multiprocessors, run_.stream);
  });
  launch([&] { return launch_tau({rows_, rank, arrays_.guess_kept, arrays_.guess_count, arrays_.tau}, run_.stream); });
}

// tau of an anchor is its last winner's score, below its K-th: about what witnesses will prove for its neighbours.
void CudaGroup::score_anchors() {
  const Rows anchors{.first = first_anchor(rows_), .step = kAnchorStep};
  const std::int64_t count = anchor_count(rows_);
  const int most = anchor_winners(topk_);
  for (std::int64_t at = 0; at < count; at += run_.plan.full_queries) {
    Rows pass = anchors;
    pass.first += at * kAnchorStep;
    score_pass(run_.in, every_key(run_.in.nk), pass, std::min<std::int64_t>(run_.plan.full_queries, count - at), most,
               arrays_.anchor_kept, arrays_.anchor_size, {});
  }
  launch([&] {
    return launch_winners({.lists = count,
                           .kept = arrays_.anchor_kept,
                           .ids = nullptr,
                           .stride = most,
                           .count = arrays_.anchor_size,
                           .length = most,
                           .nk = run_.in.nk,
                           .sorted = arrays_.winners,
                           .sorted_stride = most,
                           .sorted_count = arrays_.winner_count},
                          run_.stream);
  });
  forget_tau();
  launch([&] {
    return launch_tau({count, most, arrays_.anchor_kept, arrays_.anchor_size, arrays_.tau, anchors}, run_.stream);
  });
}

CertifyInputs CudaGroup::certify_inputs() const {
  return {.in = run_.in,
          .first_row = first_row_,
          .rows = rows_,
          .rho = arrays_.rho,
          .inv_alpha = arrays_.inv_alpha,
          .tau = arrays_.tau,
          .base = run_.plan.options.certificate.form == Form::base,
          .allowances = 1,
          .ablation = run_.plan.options.certificate.ablation,
          .period = run_.plan.key_slices,
          .slice_stride = run_.plan.slice_keys};
}

void CudaGroup::choose_budgets() {
  const Options& options = run_.plan.options;
  if (options.certificate.row_budget != 0) {
    launch([&] {
      return cudaMemsetAsync(arrays_.budget, options.certificate.row_budget, static_cast<std::size_t>(rows_), run_.stream);
    });
    return;
  }
  if (samples(run_.plan)) expect_tau();
  launch([&] {
    return launch_predict({certify_inputs(), first_anchor(rows_), kAnchorStep, arrays_.predicted, arrays_.sampled}, run_.stream);
  });
  const int heads = run_.in.heads;
  const double dense = score_price(heads);
  const double witnesses = samples(run_.plan) ? 0 : static_cast<double>(seed_stride(topk_)) * survivor_price(heads);
  const double keys = static_cast<double>(std::max<std::int64_t>(run_.in.nk, 1));
  launch([&] {
    return launch_choose({.rows = rows_,
                          .group_rows = kGroupRows,
                          .stride = kAnchorStep,
                          .survivors = arrays_.predicted,
                          .sampled = arrays_.sampled,
                          .row_price = kBoundRowPrice / dense,
                          .survivor_price = survivor_price(heads) / dense,
                          .fixed_price = (witnesses + certificate_price(heads)) / keys / dense,
                          .too_loose = run_.screens_always ? std::numeric_limits<double>::infinity()
                                                         : kWorthwhile * (1 + kSelectPrice / dense),
                          .budget = arrays_.budget},
                         run_.stream);
  });
}

void CudaGroup::take_witnesses() {
  const bool chain = run_.plan.options.seeds != SeedPolicy::nearest_spread;
  launch([&] {
    return launch_seed({.in = run_.in,
                        .first_row = first_row_,
                        .rows = rows_,
                        .group = group_rows(run_.in.heads),
                        .topk = topk_,
                        .winners = chain ? arrays_.winners : nullptr,
                        .winners_stride = anchor_winners(topk_),
                        .winners_count = arrays_.winner_count,
                        .rows_per_list = kAnchorStep,
                        .ids = arrays_.ids,
                        .ids_stride = seed_stride(topk_),
                        .offset = arrays_.offset,
                        .count = arrays_.seed_count,
                        .budget = arrays_.budget,
                        .min_context = run_.plan.options.min_context},
                       run_.stream);
  });
  forget_tau();  // every witness is recorded
  forget_records();
  refine_lists(arrays_.seed_count, nullptr);
  select_records(topk_, arrays_.kept, arrays_.kept_count);
  launch([&] { return launch_tau({rows_, topk_, arrays_.kept, arrays_.kept_count, arrays_.tau}, run_.stream); });
}

void CudaGroup::certify() {
  if (!is_dosa()) return;
  const ScopedLap timed = lap(&Stats::seconds_certify);
  launch([&] {
    return launch_certify({.inputs = certify_inputs(),
                           .budget = arrays_.budget,
                           .min_context = run_.plan.options.min_context,
                           .bound_rows = arrays_.bound_rows,
                           .bound_stride = kWidestBudget * kDim,
                           .weight = arrays_.weight,
                           .weight_stride = kWidestBudget,
                           .c = arrays_.c,
                           .sigma = arrays_.sigma,
                           .tau = arrays_.lowered,
                           .screened = arrays_.screened},
                          run_.stream);
  });
  launch([&] { return launch_lists({rows_, arrays_.screened, arrays_.list, arrays_.list_size}, run_.stream); });
}

bool CudaGroup::next_slice() {
  if (!is_dosa() || ++slice_ >= run_.plan.key_slices) return false;
  keys_ = slice_of(run_.in.nk, slice_, run_.plan.key_slices);
  return true;
}

void CudaGroup::screen() {
  const ScopedLap timed = lap(&Stats::seconds_screen);
  const std::int64_t stride = mask_words(run_.plan.slice_keys);
  for (int i = 0; i < kBudgetCount; ++i) {
    launch([&] {
      return launch_screen({.k = run_.in.k,
                            .rho = arrays_.rho + slice_ * run_.plan.slice_keys,
                            .inv_alpha = arrays_.inv_alpha + slice_ * run_.plan.slice_keys,
                            .exempt = arrays_.exempt + slice_ * stride,
                            .ks = run_.in.ks,
                            .ke = run_.in.ke,
                            .first_row = first_row_,
                            .keys = keys_,
                            .budget = budget_at(i),
                            .list = arrays_.list + i * rows_,
                            .list_size = arrays_.list_size + i,
                            .list_capacity = rows_,
                            .bound_rows = arrays_.bound_rows,
                            .bound_stride = kWidestBudget * kDim,
                            .weight = arrays_.weight,
                            .weight_stride = kWidestBudget,
                            .c = arrays_.c,
                            .sigma = arrays_.sigma,
                            .tau = arrays_.lowered,
                            .mask = arrays_.mask,
                            .mask_stride = stride},
                           run_.multiprocessors, run_.stream);
    });
  }
  launch([&] {
    return launch_compact({.ks = run_.in.ks,
                           .ke = run_.in.ke,
                           .first_row = first_row_,
                           .rows = rows_,
                           .keys = keys_,
                           .mask = arrays_.mask,
                           .mask_stride = stride,
                           .screened = arrays_.screened,
                           .group = group_rows(run_.in.heads),
                           .capacity = run_.plan.list_capacity,
                           .ids = arrays_.ids,
                           .offset = arrays_.offset,
                           .count = arrays_.count,
                           .lost = arrays_.lost,
                           .survivors = &arrays_.counters->survivors,
                           .listed = &arrays_.counters->refined},
                          run_.stream);
  });
}

// Reference scores of listed keys, as records.
void CudaGroup::refine_lists(const std::int32_t* count, const std::uint8_t* screened) {
  launch([&] {
    return launch_refine({.in = run_.in,
                          .first_row = first_row_,
                          .rows = rows_,
                          .ids = arrays_.ids,
                          .offset = arrays_.offset,
                          .count = count,
                          .screened = screened,
                          .tau = arrays_.tau,
                          .found = found()},
                         run_.multiprocessors, run_.stream);
  });
}

RecordLists CudaGroup::found() const {
  return {arrays_.records, record_stride(run_.plan), arrays_.record_count, arrays_.lost};
}

// A NaN: no certificate is made, and no score lies below it.
void CudaGroup::forget_tau() {
  launch([&] { return cudaMemsetAsync(arrays_.tau, 0xFF, static_cast<std::size_t>(rows_) * sizeof(float), run_.stream); });
}

void CudaGroup::forget_records() {
  launch([&] { return cudaMemsetAsync(arrays_.record_count, 0, static_cast<std::size_t>(rows_) * sizeof(std::int32_t), run_.stream); });
}

void CudaGroup::select_records(int rank, Record* kept, std::int32_t* kept_count) {
  launch([&] {
    return launch_select_records({.rows = rows_,
                                  .records = arrays_.records,
                                  .record_stride = record_stride(run_.plan),
                                  .record_count = arrays_.record_count,
                                  .topk = rank,
                                  .kept = kept,
                                  .kept_count = kept_count},
                                 run_.multiprocessors, run_.stream);
  });
}

// Records of all slices come together. Those of witnesses are forgotten: they come again among the survivors, because a bound
// is never below its score.
void CudaGroup::refine() {
  const ScopedLap timed = lap(&Stats::seconds_refine);
  if (slice_ == 0) forget_records();
  refine_lists(arrays_.count, arrays_.screened);
  if (slice_ == 0 || slice_ + 1 == kGuessSlices) guess_tau();
}

// The slices so far are a larger sample of all keys, and their best scores are known. Records below the new tau stay: which of
// those that equal it win is known only in the end.
void CudaGroup::guess_tau() {
  const int rank = guessed_rank(topk_, static_cast<double>(run_.plan.key_slices) / (slice_ + 1));
  if (rank >= topk_) return;
  select_records(rank, arrays_.guess_kept, arrays_.guess_count);
  launch([&] {
    return launch_tau({.rows = rows_,
                       .topk = rank,
                       .kept = arrays_.guess_kept,
                       .kept_count = arrays_.guess_count,
                       .tau = arrays_.tau,
                       .raise = true,
                       .lowered = arrays_.lowered},
                      run_.stream);
  });
}

// Scores of the keys of a slice, stored, and the `keep` best of them, kept or written.
void CudaGroup::score_pass(const Inputs& in, const KeySlice& keys, const Rows& pass, std::int64_t rows, int keep, Record* kept,
                           std::int32_t* kept_count, const OutputArgs& output) {
  const std::int64_t stride = run_.plan.full_keys;
  // At least once, so that kept counts are set where there are no keys.
  for (std::int64_t key = 0; key == 0 || key < keys.count; key += stride) {
    const std::int64_t key_end = std::min<std::int64_t>(keys.count, key + stride);
    const ScoreArgs score{in, first_row_, rows, keys, key, key_end, arrays_.scores, stride, pass};
    launch([&] { return launch_score(score, run_.multiprocessors, run_.stream); });
    const SelectScoresArgs select{in, first_row_, rows,     keys, key,        key_end, arrays_.scores,
                                  stride,  keep,       key == 0, kept, kept_count, pass, key_end == keys.count ? output : OutputArgs{}};
    launch([&] { return launch_select_scores(select, run_.multiprocessors, run_.stream); });
  }
}

// Scores of all keys; those that reach tau become records.
void CudaGroup::filter_pass(const Rows& pass) {
  launch([&] {
    return launch_score({.in = run_.in,
                         .first_row = first_row_,
                         .rows = rows_,
                         .keys = every_key(run_.in.nk),
                         .key_begin = 0,
                         .key_end = run_.in.nk,
                         .scores = nullptr,
                         .score_stride = 0,
                         .pass = pass,
                         .tau = arrays_.tau,
                         .found = found()},
                        run_.multiprocessors, run_.stream);
  });
}

// How many rows there are is known on the device only; passes beyond them end at once.
void CudaGroup::store_pass(Rows pass) {
  for (; pass.first < rows_; pass.first += run_.plan.full_queries) {
    score_pass(run_.in, every_key(run_.in.nk), pass, std::min<std::int64_t>(run_.plan.full_queries, rows_ - pass.first), topk_,
               arrays_.kept, arrays_.kept_count, output());
  }
}

// The last list: rows that are not screened.
Rows CudaGroup::unscreened() {
  launch([&] { return launch_lists({rows_, arrays_.screened, arrays_.list, arrays_.list_size}, run_.stream); });
  return {.list = arrays_.list + kBudgetCount * rows_, .list_size = arrays_.list_size + kBudgetCount};
}

void CudaGroup::score_in_full() {
  const ScopedLap timed = lap(&Stats::seconds_score);
  if (filters()) return filter_pass(is_dosa() ? unscreened() : Rows{});
  if (!is_dosa()) store_pass({});
}

// Every key that was rejected, or whose score was not recorded, had a score below the tau of the time, and tau only rises. So
// where the K-th record reaches tau, nothing was missed; a row in which it does not is scored in full, as are those that were
// lost before.
void CudaGroup::select() {
  if (!filters() && !is_dosa()) return;
  const ScopedLap timed = lap(&Stats::seconds_select);
  const Rows redo{.list = arrays_.list + kBudgetCount * rows_, .list_size = arrays_.redo_size + first_row_ / run_.plan.tile_queries};
  launch([&] {
    return launch_select_records({.rows = rows_,
                                  .records = arrays_.records,
                                  .record_stride = record_stride(run_.plan),
                                  .record_count = arrays_.record_count,
                                  .topk = topk_,
                                  .kept = nullptr,
                                  .kept_count = nullptr,
                                  .output = output(),
                                  .redo = {.screened = filters() ? nullptr : arrays_.screened,
                                           .tau = arrays_.tau,
                                           .lost = arrays_.lost,
                                           .list = arrays_.list + kBudgetCount * rows_,
                                           .list_size = arrays_.redo_size + first_row_ / run_.plan.tile_queries}},
                                 run_.multiprocessors, run_.stream);
  });
  store_pass(redo);
}

OutputArgs CudaGroup::output() const {
  const Selection& out = run_.out;
  const bool scores = out.scores.present(), recent = out.recent.present();
  return {.in = run_.given,
          .first_row = first_row_,
          .topk = topk_,
          .ascending = run_.plan.options.order == Order::ascending,
          .space = run_.plan.options.index_space,
          .gathered = gathers(run_.plan.shape),
          .ids = out.ids.at<std::int32_t>(),
          .ids_stride = out.ids.stride[0],
          .scores = scores ? out.scores.at<float>() : nullptr,
          .scores_stride = scores ? out.scores.stride[0] : 0,
          .recent = recent ? out.recent.at<std::int32_t>() : nullptr,
          .recent_stride = recent ? out.recent.stride[0] : 0,
          .recent_width = recent ? out.recent.shape[1] : 0,
          .counters = arrays_.counters,
          .min_context = run_.plan.options.min_context,
          .budget = is_dosa() ? arrays_.budget : nullptr,
          .screened = arrays_.screened,
          .lost = arrays_.lost,
          .seed_count = is_dosa() && !samples(run_.plan) ? arrays_.seed_count : nullptr,
          .sample = samples(run_.plan) ? sample_of(run_.in.nk) : KeySlice{},
          .hinted = recalls() ? run_.hints.width : -1};
}

}  // namespace dosa::cuda
