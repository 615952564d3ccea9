// One group of neighbouring queries on one CPU worker: the stages of backend.hpp over kernels.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <hwy/contrib/sort/vqsort.h>

#include "backend/backend.hpp"
#include "backend/cpu/keys.hpp"
#include "backend/cpu/kernels.hpp"
#include "base/carve.hpp"
#include "certificate/choose.hpp"
#include "seed/seed.hpp"
#include "select/records.hpp"
#include "select/threshold.hpp"

namespace dosa::cpu {

/// Sizes of a worker's scratch.
struct ScratchSizes {
  int heads = 0;
  int dim = 0;
  int tile_queries = 0;
  int panel_keys = 0;       // sampled keys, a multiple of kPanelKeys; 0 where nothing is screened
  std::int64_t slice_keys = 0;  // a multiple of kPanelKeys
  std::int32_t record_capacity = 0;
  std::int64_t witness_capacity = 0;  // per query
  std::int64_t winner_capacity = 0;   // kept from an earlier query of this worker
};

/// A worker's arrays, carved from the workspace.
struct Scratch {
  Scratch(Carver& carver, const ScratchSizes& sizes);

  float* panel;                // [dim][48]
  std::uint32_t* integer_panel;  // [dim/4][48]
  KeySummaries panel_summaries;  // [48] of the panel, where summaries are not kept
  std::uint8_t* key_copies;    // [48][dim] of keys whose components are not adjacent
  float* q;                    // [tile][heads/4][dim][4]
  float* w;                    // [tile][heads]
  float* bounds;               // [tile][slice]: bounds, or scores of the dense method
  float* bound_rows;           // [tile][kMaxBoundRows][dim], packed in groups of four; integers where they are screened
  std::int32_t* row_offsets;   // [tile][kMaxBoundRows]
  std::int32_t* positions;     // [slice] collected keys
  Record* ordered;             // [slice] collected keys by bound
  std::uint32_t* sample;       // [kThresholdSample]
  Record* records;             // [tile][capacity]
  std::int32_t* witnesses;     // [tile][witness_capacity]
  std::int32_t* winners;       // [winner_capacity]
  float* q_rows;               // [tile][heads][dim]
  float* gram;                 // [tile][heads][heads]
  float* dots;                 // [tile][heads][panel_keys]
  std::int32_t* focus;         // [tile][panel_keys]
  std::int32_t* panel_ids;     // [panel_keys]
  float* panel_alpha;          // [panel_keys]
  float* panel_rho;            // [panel_keys]
  float* panel_rho_e;          // [panel_keys]
  float* panel_u;              // [panel_keys]
  float* aux_rows;             // [kMaxAggregates][dim]
  std::int8_t* integer_rows;   // [kMaxBoundRows][dim]
};

struct QueryState {
  std::int64_t row = 0;
  VisibleRange all;      // what the query sees
  VisibleRange visible;  // this part of it
  Path path = Path::full;
  RecordBuffer records;
  Certificate certificate;
  IntegerCertificate integer;  // of the certificate, where rows are integers
  std::int64_t witnesses = 0;
  RowReport report;
};

/// Fewer keys are not worth splitting between threads.
inline constexpr std::int64_t kShortestPart = std::int64_t{8} << 10;

/// Scored witnesses of every query, where threads split keys: each scores some of them, and all read them.
struct SharedSeeds {
  Record* records = nullptr;       // [nq][witness_capacity], ids ascending
  std::int32_t* counts = nullptr;  // [nq]; 0: refine takes witnesses from the screen
};

/// What a worker's groups have in common.
struct GroupContext {
  const Kernels& kernels;
  const Plan& plan;
  const Problem& problem;
  const Selection& out;
  KeySummaries summaries;                // of the wave's requests, one after the other; null where one group sees each key: it
  std::int64_t summary_stride = 0;       //   summarizes while it screens. Keys of a request there
  const std::int32_t* slots = nullptr;   // [nq] which of them a row belongs to
  SeedPolicy seeds;
  bool may_start_from_bounds = false;    // chain was not asked for by name, and a query's bounds fit one slice
  ScratchSizes sizes;
  PriceList prices;
  std::span<RowReport> reports;
  Record* part_records = nullptr;        // [nq][parts][K]; null unless threads split keys
  std::int32_t* part_counts = nullptr;   // [nq][parts]
  SharedSeeds shared_seeds;
};

class CpuGroup final : public QueryGroup {
 public:
  static constexpr int max_queries = 16;

  CpuGroup(const GroupContext& context, const Scratch& scratch, const hwy::Sorter& sorter, Stats& stats) noexcept
      : context_(context), scratch_(scratch), sorter_(sorter), stats_(stats) {}

  /// Takes the queries from `row` on that see the same request's keys, in ranges that overlap enough to share them, at most
  /// up to `end`; returns the first row of the next group. Of each query's keys only part `part` of Plan::key_parts is
  /// looked at.
  std::int64_t assign(std::int64_t row, std::int64_t end, int part);

  /// Scores this part's share of the queries' witnesses, for seed() of all parts.
  void share_seeds();

  void seed() override;
  void certify() override;
  bool next_slice() override;
  void screen() override;
  void refine() override;
  void score_in_full() override;
  void select() override;

 private:
  [[nodiscard]] const Options& options() const noexcept { return context_.plan.options; }
  [[nodiscard]] std::span<QueryState> queries() noexcept { return {queries_, static_cast<std::size_t>(count_)}; }
  [[nodiscard]] int dim() const noexcept { return context_.sizes.dim; }
  [[nodiscard]] int heads() const noexcept { return context_.sizes.heads; }
  [[nodiscard]] std::int64_t index_of(const QueryState& query) const noexcept { return &query - queries_; }
  [[nodiscard]] float* bounds_of(const QueryState& query) const noexcept {
    return scratch_.bounds + index_of(query) * context_.sizes.slice_keys;
  }
  [[nodiscard]] const float* packed_q(const QueryState& query) const noexcept {
    return scratch_.q + index_of(query) * round_up_to(heads(), kRowGroup) * dim();
  }
  [[nodiscard]] float* bound_rows_of(const QueryState& query) const noexcept {
    return scratch_.bound_rows + index_of(query) * kMaxBoundRows * dim();
  }
  [[nodiscard]] std::int32_t* row_offsets_of(const QueryState& query) const noexcept {
    return scratch_.row_offsets + index_of(query) * kMaxBoundRows;
  }
  [[nodiscard]] std::span<std::uint32_t, kThresholdSample> threshold_sample() const noexcept {
    return std::span<std::uint32_t, kThresholdSample>(scratch_.sample, kThresholdSample);
  }

  // group.cpp
  void enter_request(std::int32_t slot, std::int64_t row);
  void load_query(QueryState& query);
  void cut(VisibleRange all);
  [[nodiscard]] Path path_of(const QueryState& query) const;
  [[nodiscard]] bool is_identity(const QueryState& query) const noexcept;
  [[nodiscard]] bool is_scored_in_full(const QueryState& query) const noexcept;

  /// Union of the ranges of the queries that are `wanted`, from a panel boundary on.
  template <class Wanted>
  [[nodiscard]] VisibleRange hull_of(const Wanted& wanted);
  /// Visits every panel of `range` that a `wanted` query sees: pack(first key, rows) once per panel,
  /// visit(query, first key) per query.
  template <class Wanted, class Pack, class Visit>
  void visit_panels(VisibleRange range, const Wanted& wanted, const Pack& pack, const Visit& visit);

  // seed.cpp
  [[nodiscard]] std::span<const std::int32_t> suggested_winners(const QueryState& query);
  [[nodiscard]] std::span<std::int32_t> choose_witnesses(QueryState& query);
  void take_shared_seeds(QueryState& query);

  // score.cpp
  void pack_panel(const std::uint8_t* const* rows) const;
  void score_panel(const QueryState& query, const float* scale, float* scores) const;
  void score_keys(QueryState& query, std::span<const std::int32_t> ids);
  void score_stored();
  void score_streamed();
  template <class Visit>
  void visit_full_panels(VisibleRange range, const Visit& visit);
  void take_scores(QueryState& query, const float* scores, VisibleRange range);

  // certify.cpp
  void sample_keys(VisibleRange common);
  [[nodiscard]] SampledQuery sample_query(QueryState& query);
  void give_up(std::span<QueryState* const> screened);
  [[nodiscard]] QueryHeads load_heads(const QueryState& query);
  [[nodiscard]] PredictionScratch prediction_scratch() const noexcept;
  void build(QueryState& query, const SampledQuery& sample);
  void pack_rows(const QueryState& query, const QueryHeads& heads_of_query);
  void pack_integer_rows(const QueryState& query);

  // refine.cpp
  void pack_panel_to_screen(std::int64_t first, const std::uint8_t* const* rows);
  void bound_panel(const QueryState& query, const KeySummaries& summaries, float* bounds) const;
  void refine_query(QueryState& query, VisibleRange range);
  [[nodiscard]] std::int64_t drop_witnesses(const QueryState& query, std::int64_t first, std::int64_t count) const;
  void refine_all(QueryState& query, std::int64_t first, std::int64_t count);
  void refine_best_first(QueryState& query, const float* bounds, std::int64_t first, std::int64_t count);

  // select.cpp
  void keep_winners(QueryState& query);
  void count_path(Path path);

  const GroupContext& context_;
  const Scratch& scratch_;
  const hwy::Sorter& sorter_;
  Stats& stats_;

  std::int32_t slot_ = -1;
  KeySource keys_;
  KeySummaries summaries_;  // null where summaries are not kept
  QueryState queries_[max_queries];
  int count_ = 0;
  int part_ = 0;
  VisibleRange slice_;
  bool sliced_ = false;  // slice_ is one of this group's
  // What the next group learns from this worker's last ones.
  CertificatePlan plan_{{Form::extended, 15, 1}, ScreenPrecision::i8};
  int loose_groups_ = 0;  // groups in a row whose certificates were too loose to pay
  int unplanned_groups_ = 0;  // groups still to be scored in full without planning
  int panel_keys_ = 0;
  std::int64_t winners_ = 0;
};

constexpr VisibleRange meet(VisibleRange a, VisibleRange b) noexcept {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

template <class Wanted>
VisibleRange CpuGroup::hull_of(const Wanted& wanted) {
  VisibleRange hull{keys_.count, 0};
  for (const QueryState& query : queries()) {
    if (!wanted(query) || query.visible.size() == 0) continue;
    hull = {std::min(hull.begin, query.visible.begin), std::max(hull.end, query.visible.end)};
  }
  return {hull.begin / kPanelKeys * kPanelKeys, hull.end};
}

template <class Wanted, class Pack, class Visit>
void CpuGroup::visit_panels(VisibleRange range, const Wanted& wanted, const Pack& pack, const Visit& visit) {
  const std::uint8_t* rows[kPanelKeys];
  for (std::int64_t first = range.begin; first < range.end; first += kPanelKeys) {
    bool packed = false;
    for (QueryState& query : queries()) {
      if (!wanted(query) || meet(query.visible, {first, first + kPanelKeys}).size() == 0) continue;
      if (!packed) {
        keys_.load(first, keys_.count, scratch_.key_copies, rows);
        pack(first, static_cast<const std::uint8_t* const*>(rows));
        keys_.prefetch(first + kPanelKeys);
        packed = true;
      }
      visit(query, first);
    }
  }
}

/// Writes one output row of `records` (at most K, sorted): absolute ids, scores, padding.
void write_row(const Plan& plan, const Selection& out, const hwy::Sorter& sorter, std::int64_t row,
               std::span<Record> records);

}  // namespace dosa::cpu
