// The CPU backend: sizes, workers, and the order of a run.
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <tbb/task_arena.h>

#include "backend/cpu/group.hpp"
#include "backend/cpu/timer.hpp"
#include "base/parallel.hpp"
#include "decode/recent.hpp"

namespace dosa::cpu {
namespace {

constexpr std::int64_t kLongestSlice = std::int64_t{2731} * kPanelKeys;  // 128 K keys; bounds of 16 queries are then 8 MiB
constexpr std::int64_t kShortestSlice = std::int64_t{86} * kPanelKeys;   // 4 K keys

bool screens(const Options& options) { return options.method == Method::dosa || options.method == Method::automatic; }

// Where several groups see a key, its summary is formed once and kept; else, as in decoding, when it is screened.
bool keeps_summaries(const Plan& plan) {
  const std::int64_t requests = std::clamp<std::int64_t>(plan.shape.requests, 1, std::max<std::int64_t>(plan.shape.nq, 1));
  return screens(plan.options) && plan.tile_queries * requests < plan.shape.nq;
}

SeedPolicy resolve(const Options& options, const Plan& plan, bool hints) {
  if (!screens(options)) return SeedPolicy::largest_bounds;  // nothing is seeded, and no winners are kept
  if (options.seeds != SeedPolicy::automatic) return options.seeds;
  return hints || plan.slice_keys < plan.shape.nk ? SeedPolicy::chain : SeedPolicy::largest_bounds;
}

ScratchSizes scratch_sizes(const Plan& plan) {
  const ProblemShape& shape = plan.shape;
  return {.heads = shape.heads,
          .dim = shape.dim,
          .tile_queries = plan.tile_queries,
          .panel_keys = plan.panel_keys,
          .slice_keys = plan.slice_keys,
          .record_capacity = plan.record_capacity,
          .witness_capacity = max_witnesses(shape.topk, 2 * std::int64_t{shape.topk}),
          .winner_capacity = 2 * std::int64_t{shape.topk}};
}

// Everything a run keeps in its workspace.
struct Layout {
  KeySummaries summaries;               // of wave_requests requests
  std::int64_t summary_stride = 0;      // keys of a request there
  std::int32_t* slots = nullptr;        // [nq]
  std::int32_t* winners = nullptr;      // [2][K] of one row, to be remembered, and scratch
  Stats* worker_stats = nullptr;        // [threads]
  Record* part_records = nullptr;       // [nq][parts][K]
  std::int32_t* part_counts = nullptr;  // [nq][parts]
  SharedSeeds seeds;
  std::size_t workers_at = 0;
  std::size_t worker_bytes = 0;
  std::size_t bytes = 0;

  Layout(const Plan& plan, void* base) {
    Carver carver(base);
    if (keeps_summaries(plan)) {
      summary_stride = (plan.shape.nk + kPanelKeys - 1) / kPanelKeys * kPanelKeys;
      const std::int64_t keys = plan.wave_requests * summary_stride;
      summaries = {carver.take<float>(keys), carver.take<float>(keys), carver.take<float>(keys)};
    }
    slots = carver.take<std::int32_t>(plan.shape.nq);
    winners = carver.take<std::int32_t>(2 * std::int64_t{plan.shape.topk});
    if (plan.key_parts > 1) {
      part_records = carver.take<Record>(plan.shape.nq * plan.key_parts * plan.shape.topk);
      part_counts = carver.take<std::int32_t>(plan.shape.nq * plan.key_parts);
      if (screens(plan.options)) {
        seeds = {carver.take<Record>(plan.shape.nq * scratch_sizes(plan).witness_capacity), carver.take<std::int32_t>(plan.shape.nq)};
      }
    }
    worker_stats = carver.take<Stats>(plan.threads);
    workers_at = carver.used();
    Carver worker(nullptr);
    const Scratch counted(worker, scratch_sizes(plan));
    worker_bytes = worker.used();
    bytes = workers_at + worker_bytes * static_cast<std::size_t>(plan.threads);
  }
};

// The winners of the last of a request's rows that has any; ids are absolute still. `winners` [2][K].
void remember_winners(const Problem& problem, const Selection& out, std::int32_t* winners, const hwy::Sorter& sorter) {
  const std::int64_t nq = problem.q.shape[0];
  std::size_t count = 0;
  for (std::int64_t row = 0; row < nq; ++row) {
    const std::int64_t request = request_of(problem, row);
    if (*out.ids.at<std::int32_t>(row, 0) >= 0) {
      for (count = 0; count < static_cast<std::size_t>(problem.topk); ++count) {
        winners[count] = *out.ids.at<std::int32_t>(row, count);
        if (winners[count] < 0) break;
      }
    }
    if (row + 1 < nq && request_of(problem, row + 1) == request) continue;
    const std::span recent(out.recent.at<std::int32_t>(request), static_cast<std::size_t>(out.recent.shape[1]));
    if (count > 0) remember({winners, count}, recent, {winners + problem.topk, count}, sorter);
    count = 0;
  }
}

// Queries of a request, on average, that share a packed panel.
std::int64_t queries_of_a_tile(const ProblemShape& shape) {
  const std::int64_t nq = std::max<std::int64_t>(shape.nq, 1);
  const std::int64_t requests = std::clamp<std::int64_t>(shape.requests, 1, nq);
  return std::min<std::int64_t>((nq + requests - 1) / requests, CpuGroup::max_queries);
}

// Measured ratios on AVX-512: packing a panel of f32 takes a quarter of scoring it with 32 heads (less on AVX2), of integers half
// of that, with norms as long as of f32, storing and comparing a bound as long as 0.4 heads, and an integer row 0.32 of an f32 row.
PriceList prices_for(const ProblemShape& shape, const Kernels& kernels) {
  const double shared_by = static_cast<double>(queries_of_a_tile(shape));
  const double pack = 0.24 * 32 / shape.heads;
  const double dense = 1.0 + pack / shared_by;
  const double head = 1.0 / shape.heads / dense;
  const double packed = pack / shared_by / dense;
  const double integers = shared_by < CpuGroup::max_queries ? packed : 0.5 * packed;
  return {.f32 = {.row = head, .survivor = (1.0 + pack) / dense, .fixed = packed + 0.4 * head},
          .i8 = {.row = 0.32 * head, .survivor = (1.0 + pack) / dense, .fixed = integers + 0.4 * head},
          .has_i8 = kernels.bound_panel_i8 != nullptr,
          .row_multiple = kRowGroup};
}

/// Neighbouring rows of at most Plan::wave_requests requests.
struct Wave {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The wave from row `begin` on. Rows of one request that do not follow each other count as two.
Wave next_wave(const Problem& problem, std::int64_t begin, std::int64_t nq, std::int64_t most_requests, std::int32_t* slots) {
  std::int32_t slot = 0;
  std::int64_t row = begin;
  for (; row < nq; ++row) {
    if (row > begin && request_of(problem, row) != request_of(problem, row - 1)) ++slot;
    if (slot == most_requests) break;
    slots[row] = slot;
  }
  return {begin, row};
}

// visit(first row, end, part) for a worker's share of all groups' parts.
template <class Visit>
void visit_parts(const Plan& plan, Wave wave, int worker, const Visit& visit) {
  const std::int64_t parts = plan.key_parts;
  const std::int64_t tile = plan.tile_queries;
  const std::int64_t tiles = (wave.end - wave.begin + tile - 1) / tile;
  for (std::int64_t item = worker; item < tiles * parts; item += plan.threads) {
    const std::int64_t row = wave.begin + item / parts * tile;
    visit(row, std::min(wave.end, row + tile), static_cast<int>(item % parts));
  }
}

class CpuBackend final : public BackendImpl {
 public:
  CpuBackend(const Options& options, const Kernels& kernels, int threads)
      : options_(options), kernels_(kernels), threads_(threads), workers_(threads) {
    for (int i = 0; i < threads; ++i) sorters_.emplace_back();
  }

  Result<Plan> plan(const ProblemShape& shape) const override;
  Result<Stats> run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                    std::span<RowReport> reports) const override;
  [[nodiscard]] Result<Stats> counters(const Plan&, Workspace) const override { return Stats{}; }

 private:
  void summarize(const GroupContext& context, Wave wave, Stats& stats) const;
  void run_worker(const GroupContext& context, Wave wave, int worker, const Scratch& scratch, Stats& stats) const;
  void seed_worker(const GroupContext& context, Wave wave, int worker, const Scratch& scratch, Stats& stats) const;
  void merge_parts(const GroupContext& context) const;
  void rename_ids(const GroupContext& context) const;

  Options options_;
  const Kernels& kernels_;
  int threads_;
  ForkJoin workers_;
  std::deque<hwy::Sorter> sorters_;  // one per worker; they hold buffers, and run does not allocate
};

Result<Plan> CpuBackend::plan(const ProblemShape& shape) const {
  Plan plan;
  plan.shape = shape;
  plan.options = options_;
  if (plan.options.min_context == 0) plan.options.min_context = 3 * std::int64_t{shape.topk} + 4096;
  plan.implementation = kernels_.name;
  plan.options.implementation = kernels_.name;  // the caller's name may not live as long as the plan
  const std::int64_t nq = std::max<std::int64_t>(shape.nq, 1);
  const std::int64_t requests = std::clamp<std::int64_t>(shape.requests, 1, nq);
  const std::int64_t tile = queries_of_a_tile(shape);
  const std::int64_t tiles = (nq + tile - 1) / tile;
  plan.threads = threads_;
  if (tiles < threads_) {
    plan.key_parts = static_cast<std::int32_t>(std::clamp<std::int64_t>(shape.nk / kShortestPart, 1, threads_ / tiles));
    plan.threads = static_cast<std::int32_t>(tiles * plan.key_parts);
  }
  plan.record_capacity = 2 * shape.topk + 256;
  if (screens(plan.options)) {
    const std::int64_t sampled = shape.nk / plan.key_parts / 128;  // each part plans for its own keys
    plan.panel_keys = round_up_to(static_cast<std::int32_t>(std::clamp<std::int64_t>(sampled, 240, 1008)), kPanelKeys);
  }
  const std::int64_t whole = std::max<std::int64_t>(kPanelKeys, (shape.nk + kPanelKeys - 1) / kPanelKeys * kPanelKeys);
  std::int64_t slice = std::min(whole, kLongestSlice);
  const std::int64_t shortest = std::min(whole, kShortestSlice);
  // Shrink what costs least first: requests at a time, slices, queries that share a panel, and last what keeps workers busy.
  plan.tile_queries = static_cast<std::int32_t>(tile);
  std::int64_t held = requests;
  while (true) {
    plan.slice_keys = slice;
    plan.wave_requests = keeps_summaries(plan) ? held : nq;
    plan.workspace_bytes = Layout(plan, nullptr).bytes;
    if (static_cast<std::int64_t>(plan.workspace_bytes) <= options_.memory_budget) return plan;
    if (held > plan.threads && keeps_summaries(plan)) {
      held = std::max<std::int64_t>(plan.threads, held / 2);
    } else if (slice > shortest) {
      slice = std::max(shortest, slice / 2 / kPanelKeys * kPanelKeys);
    } else if (plan.tile_queries > 1) {
      plan.tile_queries = (plan.tile_queries + 1) / 2;
    } else if (held > 1 && keeps_summaries(plan)) {
      held = (held + 1) / 2;
    } else if (plan.threads > 1) {
      plan.threads = (plan.threads + 1) / 2;
    } else {
      return fail(ErrorCode::memory_budget,
                  fmt::format("memory_budget is {} bytes; {} queries of {} heads over {} keys need at least {}",
                              options_.memory_budget, shape.nq, shape.heads, shape.nk, plan.workspace_bytes));
    }
  }
}

Result<Stats> CpuBackend::run(const Plan& plan, const Problem& problem, const Selection& out, Workspace workspace,
                              std::span<RowReport> reports) const {
  const Layout layout(plan, workspace.data);
  const bool suggestions = problem.hints.present() || out.recent.present();
  const GroupContext context{.kernels = kernels_,
                             .plan = plan,
                             .problem = problem,
                             .out = out,
                             .summaries = layout.summaries,
                             .summary_stride = layout.summary_stride,
                             .slots = layout.slots,
                             .seeds = resolve(plan.options, plan, suggestions),
                             .may_start_from_bounds = plan.options.seeds == SeedPolicy::automatic && plan.slice_keys >= plan.shape.nk,
                             .sizes = scratch_sizes(plan),
                             .prices = prices_for(plan.shape, kernels_),
                             .reports = reports,
                             .part_records = layout.part_records,
                             .part_counts = layout.part_counts,
                             .shared_seeds = layout.seeds};
  Stats total;
  std::uninitialized_default_construct_n(layout.worker_stats, plan.threads);
  Wave wave;
  while (wave.end < plan.shape.nq) {
    wave = next_wave(problem, wave.end, plan.shape.nq, plan.wave_requests, layout.slots);
    if (context.summaries.present()) summarize(context, wave, total);
    const auto for_each_worker = [&](const auto& body) {
      workers_.for_each_worker(plan.threads, [&](int worker) {
        Carver carver(static_cast<std::byte*>(workspace.data) + layout.workers_at + static_cast<std::size_t>(worker) * layout.worker_bytes);
        const Scratch scratch(carver, context.sizes);
        body(worker, scratch, layout.worker_stats[worker]);
      });
    };
    if (context.shared_seeds.records != nullptr && context.seeds != SeedPolicy::largest_bounds) {
      for_each_worker([&](int worker, const Scratch& scratch, Stats& stats) { seed_worker(context, wave, worker, scratch, stats); });
    }
    for_each_worker([&](int worker, const Scratch& scratch, Stats& stats) { run_worker(context, wave, worker, scratch, stats); });
  }
  if (plan.key_parts > 1) merge_parts(context);
  if (out.recent.present()) remember_winners(problem, out, layout.winners, sorters_.front());
  if (plan.options.index_space != IndexSpace::absolute) rename_ids(context);
  for (int worker = 0; worker < plan.threads; ++worker) total += layout.worker_stats[worker];
  return total;
}

// Only keys that a screened row of the request can see: time follows the real lengths, not the declared ones.
void CpuBackend::summarize(const GroupContext& context, Wave wave, Stats& stats) const {
  ScopedTimer timer(stats.seconds_certify);
  const ProblemShape& shape = context.plan.shape;
  const std::int64_t workers = context.plan.threads;
  std::atomic<std::int64_t> exempt{0};
  workers_.for_each_worker(context.plan.threads, [&](int worker) {
    std::int64_t row = wave.begin;
    while (row < wave.end) {
      const std::int64_t slot = context.slots[row];
      const KeySource keys{KeyRows(context.problem, request_of(context.problem, row)), shape.nk, shape.dim};
      VisibleRange hull{shape.nk, 0};
      for (; row < wave.end && context.slots[row] == slot; ++row) {
        const VisibleRange visible = visible_range(context.problem, row);
        if (visible.size() > shape.topk) hull = {std::min(hull.begin, visible.begin), std::max(hull.end, visible.end)};
      }
      if (hull.size() == 0) continue;
      const std::int64_t first = hull.begin / kPanelKeys;
      const std::int64_t panels = (hull.end + kPanelKeys - 1) / kPanelKeys - first;
      const std::int64_t at = slot * context.summary_stride;
      exempt += summarize_keys(kernels_, keys, (first + panels * worker / workers) * kPanelKeys,
                               (first + panels * (worker + 1) / workers) * kPanelKeys,
                               context.summaries.from(at));
    }
  });
  stats.exempt += exempt;
}

// Many queries: each worker has a stretch of them. Few: each group of queries is done in parts of its keys.
void CpuBackend::run_worker(const GroupContext& context, Wave wave, int worker, const Scratch& scratch, Stats& stats) const {
  CpuGroup group(context, scratch, sorters_[static_cast<std::size_t>(worker)], stats);
  const auto run_rows = [&](std::int64_t row, std::int64_t end, int part) {
    while (row < end) {
      row = group.assign(row, end, part);
      select_group(group);
    }
  };
  const std::int64_t rows = wave.end - wave.begin;
  const std::int64_t threads = context.plan.threads;
  const std::int64_t tile = context.plan.tile_queries;
  if (context.plan.key_parts == 1) {
    // Rows of a request stay together where there are several.
    const std::int64_t unit = context.plan.shape.requests > 1 ? tile : 1;
    const std::int64_t units = (rows + unit - 1) / unit;
    const auto row_at = [&](std::int64_t at) { return wave.begin + std::min(rows, units * at / threads * unit); };
    run_rows(row_at(worker), row_at(worker + 1), 0);
    return;
  }
  visit_parts(context.plan, wave, worker, run_rows);
}

// Where threads share the keys of a query, they share its witnesses too: each scores some, before any needs tau.
void CpuBackend::seed_worker(const GroupContext& context, Wave wave, int worker, const Scratch& scratch, Stats& stats) const {
  Stats counted;  // rows are counted when they are run
  CpuGroup group(context, scratch, sorters_[static_cast<std::size_t>(worker)], counted);
  visit_parts(context.plan, wave, worker, [&](std::int64_t row, std::int64_t end, int part) {
    while (row < end) {
      row = group.assign(row, end, part);
      group.share_seeds();
    }
  });
  stats.seeds += counted.seeds;
  stats.seconds_seed += counted.seconds_seed;
}

// The K first of what the parts of a row's keys kept: each part keeps its own K first, so none is missing.
void CpuBackend::merge_parts(const GroupContext& context) const {
  const std::int64_t parts = context.plan.key_parts;
  const std::int64_t k = context.plan.shape.topk;
  for (std::int64_t row = 0; row < context.plan.shape.nq; ++row) {
    Record* records = context.part_records + row * parts * k;
    std::int64_t count = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t kept = context.part_counts[row * parts + part];
      std::move(records + part * k, records + part * k + kept, records + count);
      count += kept;
    }
    sorters_.front()(records, static_cast<std::size_t>(count), hwy::SortAscending());
    const auto selected = static_cast<std::size_t>(std::min(count, k));
    write_row(context.plan, context.out, sorters_.front(), row, {records, selected});
  }
}

// Positions to ids of the index space; padding stays what it is.
void CpuBackend::rename_ids(const GroupContext& context) const {
  const std::int64_t nq = context.plan.shape.nq;
  const std::int64_t threads = context.plan.threads;
  workers_.for_each_worker(context.plan.threads, [&](int worker) {
    for (std::int64_t row = nq * worker / threads; row < nq * (worker + 1) / threads; ++row) {
      const KeyRows keys(context.problem, request_of(context.problem, row));
      const std::int64_t first_visible = visible_range(context.problem, row).begin;
      for (std::int32_t at = 0; at < context.plan.shape.topk; ++at) {
        std::int32_t& id = *context.out.ids.at<std::int32_t>(row, at);
        if (id >= 0) id = keys.id_of(id, context.plan.options.index_space, first_visible);
      }
    }
  });
}

}  // namespace
}  // namespace dosa::cpu

namespace dosa {

Result<std::unique_ptr<BackendImpl>> make_cpu_backend(const Options& options) {
  if (options.seeds == SeedPolicy::sample) {
    return fail(ErrorCode::invalid_argument, "seeds sample needs the cuda backend; cpu has nearest_spread, chain and largest_bounds");
  }
  const cpu::Kernels* kernels = options.implementation.empty() ? cpu::available_kernels().front()
                                                                : cpu::find_kernels(options.implementation);
  if (kernels == nullptr) {
    std::vector<std::string_view> names;
    for (const cpu::Kernels* known : cpu::available_kernels()) names.push_back(known->name);
    return fail(ErrorCode::unsupported_device, fmt::format("implementation is \"{}\"; this CPU runs {}",
                                                           options.implementation, fmt::join(names, ", ")));
  }
  const int threads = options.threads > 0 ? options.threads : tbb::this_task_arena::max_concurrency();
  return std::make_unique<cpu::CpuBackend>(options, *kernels, threads);
}

PriceList cpu_prices(const ProblemShape& shape, std::string_view implementation) {
  const cpu::Kernels* kernels = cpu::find_kernels(implementation);
  DOSA_INVARIANT(kernels != nullptr);
  return cpu::prices_for(shape, *kernels);
}

std::vector<std::string> cpu_implementations() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace dosa
