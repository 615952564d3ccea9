// What lies where in a run's workspace: one definition for plan (sizes) and run (addresses).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backend/cuda/prepare.hpp"
#include "base/carve.hpp"
#include "dosa/indexer.hpp"
#include "seed/seed.hpp"

namespace dosa::cuda {

/// Queries of a request, on average, up to which its keys are scored where they lie, in pages. For more, pages are gathered first.
inline constexpr std::int64_t kMostTogether = 8;
constexpr bool gathers(const ProblemShape& shape) { return shape.page_size > 0 && shape.nq > kMostTogether * shape.requests; }
constexpr bool scores_pages(const ProblemShape& shape) { return shape.page_size > 0 && !gathers(shape); }

/// Keys as the stages number them: of all requests, one after the other, where pages are gathered.
constexpr std::int64_t key_room(const ProblemShape& shape) { return gathers(shape) ? shape.requests * shape.nk : shape.nk; }

/// Every so many rows, one is scored in full first: its winners are the witnesses of its neighbours. Closer anchors give a
/// higher tau, and all of them cost 1 / step of dense.
inline constexpr std::int64_t kAnchorStep = 64;

/// Best records of an anchor that are kept.
constexpr int anchor_winners(int topk) { return topk + topk / 2; }

/// Anchors of a slice: rows first, first + kAnchorStep, ... The last block of rows may be short.
constexpr std::int64_t first_anchor(std::int64_t rows) { return std::min(kAnchorStep / 2, (rows - 1) % kAnchorStep); }
constexpr std::int64_t anchor_count(std::int64_t rows) {
  return (rows - first_anchor(rows) + kAnchorStep - 1) / kAnchorStep;
}

constexpr std::int64_t seed_stride(int topk) { return max_witnesses(topk, anchor_winners(topk)); }

/// Lists have room for one of so many keys of each group of rows: neighbours together keep more than one row does.
inline constexpr std::int64_t kListShare = 2;

/// The keys whose scores tau is guessed from: few enough to cost little, enough for the guess to be near.
constexpr KeySlice sample_of(std::int64_t nk) {
  constexpr std::int64_t kFewest = 4096, kLongestStep = 64;
  const int step = static_cast<int>(std::clamp<std::int64_t>(nk / kFewest, 1, kLongestStep));
  return slice_of(nk, step / 2, step);
}

/// The rank that the K-th of all keys is expected to have in an even sample of one key of `step`, and some more for safety:
/// so many standard deviations of a random sample; an even one is no worse.
inline int guessed_rank(int topk, double step) {
  constexpr double kDeviations = 4;
  const double share = topk / step;
  return static_cast<int>(std::min<double>(topk, std::ceil(share + kDeviations * (std::sqrt(share) + 1))));
}

/// Does the plan guess tau from a sample? The other policies take witnesses for rows that are screened.
constexpr bool samples(const Plan& plan) {
  const SeedPolicy seeds = plan.options.seeds;
  if (scores_pages(plan.shape)) return false;
  return plan.options.method == Method::fused || (plan.options.method == Method::dosa && (seeds == SeedPolicy::automatic || seeds == SeedPolicy::sample));
}

/// Keys in pages that are scored where they lie are never screened: tau comes from hinted keys, and scores are filtered.
constexpr bool screens(const Plan& plan) { return plan.options.method == Method::dosa && !scores_pages(plan.shape); }
constexpr bool recalls(const Plan& plan) { return plan.options.method != Method::dense && scores_pages(plan.shape); }

/// Hinted ids of a row that are looked at.
constexpr std::int64_t most_hints(int topk) { return 2 * std::int64_t{topk}; }

/// Records of a row: as many scores as reach a tau that is guessed from a sample, with four standard deviations to spare; or all
/// witnesses, and later what reaches the tau that they prove. Below a poor one there may be many more than K in the first slice.
inline std::int64_t record_stride(const Plan& plan) {
  const int topk = plan.shape.topk;
  const std::int64_t keys = std::max<std::int64_t>(key_room(plan.shape), 1);
  if (recalls(plan)) return std::min(keys, std::clamp<std::int64_t>(4 * std::int64_t{topk}, 2048, 12288));  // fits one CTA: select.cu
  const int step = sample_of(key_room(plan.shape)).period;
  const double rank = guessed_rank(topk, step);
  const auto reached = static_cast<std::int64_t>(step * (rank + 4 * (std::sqrt(rank) + 2)));
  const std::int64_t wanted = samples(plan) ? std::max<std::int64_t>(reached, topk) : seed_stride(topk) + 2 * std::int64_t{topk};
  return std::min(wanted, keys);
}

constexpr int kWidestBudget = budget_at(kBudgetCount - 1);

/// Arrays of a run. Rows are those of a slice.
struct Arrays {
  Counters* counters;        // zero at first, as is
  std::int32_t* done;        // [rows], where tau comes from hinted keys
  std::int32_t* redo_size;   // [slices of queries] rows that are scored in full in the end
  Record* kept;              // [rows][topk]
  std::int32_t* kept_count;  // [rows]
  float* scores;             // [full_queries][full_keys]; shares its place with lists and records

  // fused and dosa
  float* tau;                  // [rows]
  std::uint8_t* lost;          // [rows]
  std::int32_t* list;          // [kBudgetCount + 1][rows]
  std::int32_t* list_size;     // [kBudgetCount + 1]
  std::int32_t* record_count;  // [rows]
  Record* records;             // [rows][record_stride]
  std::uint8_t* sample_k;      // [keys of the sample][128]
  float* sample_scale;         // [keys of the sample]
  std::uint32_t* codes;        // [rows][most_hints]

  // where pages are gathered
  std::uint8_t* k;        // [key_room][128]
  float* k_scale;         // [key_room]
  std::int32_t* ks;       // [nq]
  std::int32_t* ke;       // [nq]
  std::int32_t* seen_to;  // [requests]

  // dosa alone
  float* rho;             // [key_slices][slice_keys]
  float* inv_alpha;       // [key_slices][slice_keys]
  std::uint32_t* exempt;  // [key_slices][mask_words(slice_keys)]

  Record* anchor_kept;        // [anchors][winners]
  std::int32_t* anchor_size;  // [anchors]
  std::int32_t* winners;      // [anchors][winners]
  std::int32_t* winner_count;  // [anchors]
  std::int32_t* predicted;    // [anchors][kBudgetCount]
  std::int32_t* sampled;      // [anchors]

  std::uint8_t* budget;      // [rows]
  std::uint8_t* screened;    // [rows]
  std::uint8_t* bound_rows;  // [rows][kWidestBudget][128]
  std::uint16_t* weight;     // [rows][kWidestBudget]
  float* c;                  // [rows]
  float* sigma;              // [rows][2]
  float* lowered;            // [rows] the screen's tau
  std::int32_t* seed_count;  // [rows], of groups of rows
  std::int64_t* offset;      // [rows], of groups of rows
  std::int32_t* count;       // [rows], of groups of rows
  Record* guess_kept;          // [rows][rank], rank < topk; where there are slices
  std::int32_t* guess_count;   // [rows]

  std::int32_t* ids;    // witnesses [groups][seed_stride], later survivors [list_capacity]
  std::uint32_t* mask;  // [rows][mask_words(slice_keys)]

  std::size_t bytes;
  std::size_t bytes_to_clear;      // at the beginning
  std::size_t bytes_beside_lists;  // without what lists and scores share

  Arrays(const Plan& plan, void* base) : Arrays() {
    Carver carver(base);
    const std::int64_t rows = plan.tile_queries;
    counters = carver.take<Counters>(1);
    done = carver.take<std::int32_t>(recalls(plan) ? rows : 0);
    redo_size = carver.take<std::int32_t>((plan.shape.nq + rows - 1) / std::max<std::int64_t>(rows, 1));
    bytes_to_clear = carver.used();
    kept = carver.take<Record>(rows * plan.shape.topk);
    kept_count = carver.take<std::int32_t>(rows);
    if (plan.options.method != Method::dense) {
      tau = carver.take<float>(rows);
      lost = carver.take<std::uint8_t>(rows);
      list = carver.take<std::int32_t>((kBudgetCount + 1) * rows);
      list_size = carver.take<std::int32_t>(kBudgetCount + 1);
      record_count = carver.take<std::int32_t>(rows);
      const std::int64_t keys = samples(plan) ? sample_of(key_room(plan.shape)).count : 0;
      sample_k = carver.take<std::uint8_t>(keys * kDim);
      sample_scale = carver.take<float>(keys);
      codes = carver.take<std::uint32_t>(recalls(plan) ? rows * most_hints(plan.shape.topk) : 0);
    }
    if (gathers(plan.shape)) take_keys(carver, plan.shape);
    if (screens(plan)) take_certificates(carver, plan);
    // Scores are stored before anything is recorded, for a sample or anchors, and after everything is selected, of lost rows.
    bytes_beside_lists = carver.used();
    Carver lists = carver;
    if (plan.options.method != Method::dense) records = lists.take<Record>(rows * record_stride(plan));
    if (screens(plan)) {
      mask = lists.take<std::uint32_t>(rows * mask_words(plan.slice_keys));
      ids = lists.take<std::int32_t>(plan.list_capacity);
      guess_kept = lists.take<Record>(plan.key_slices > 1 ? rows * plan.shape.topk : 0);
    }
    scores = carver.take<float>(std::int64_t{plan.full_queries} * plan.full_keys);
    bytes = std::max(carver.used(), lists.used());
  }

 private:
  Arrays() = default;

  void take_keys(Carver& carver, const ProblemShape& shape) {
    k = carver.take<std::uint8_t>(key_room(shape) * kDim);
    k_scale = carver.take<float>(key_room(shape));
    ks = carver.take<std::int32_t>(shape.nq);
    ke = carver.take<std::int32_t>(shape.nq);
    seen_to = carver.take<std::int32_t>(shape.requests);
  }

  void take_certificates(Carver& carver, const Plan& plan) {
    const std::int64_t rows = plan.tile_queries;
    const std::int64_t anchors = rows / kAnchorStep + 1, most = anchor_winners(plan.shape.topk);
    rho = carver.take<float>(plan.key_slices * plan.slice_keys);
    inv_alpha = carver.take<float>(plan.key_slices * plan.slice_keys);
    exempt = carver.take<std::uint32_t>(plan.key_slices * mask_words(plan.slice_keys));
    anchor_kept = carver.take<Record>(anchors * most);
    anchor_size = carver.take<std::int32_t>(anchors);
    winners = carver.take<std::int32_t>(anchors * most);
    winner_count = carver.take<std::int32_t>(anchors);
    predicted = carver.take<std::int32_t>(anchors * kBudgetCount);
    sampled = carver.take<std::int32_t>(anchors);
    budget = carver.take<std::uint8_t>(rows);
    screened = carver.take<std::uint8_t>(rows);
    bound_rows = carver.take<std::uint8_t>(rows * kWidestBudget * kDim);
    weight = carver.take<std::uint16_t>(rows * kWidestBudget);
    c = carver.take<float>(rows);
    sigma = carver.take<float>(2 * rows);
    lowered = carver.take<float>(rows);
    seed_count = carver.take<std::int32_t>(rows);
    offset = carver.take<std::int64_t>(rows);
    count = carver.take<std::int32_t>(rows);
    guess_count = carver.take<std::int32_t>(rows);
  }
};

}  // namespace dosa::cuda
