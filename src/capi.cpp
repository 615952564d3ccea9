// The C interface: checks what C cannot say, then calls the C++ one. No exception leaves it.
#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "dosa/decode.hpp"
#include "dosa/dosa.h"
#include "dosa/flashinfer_bench.hpp"
#include "dosa/indexer.hpp"
#include "dosa/pages.hpp"

struct dosa_indexer {
  dosa::Indexer indexer;
};

struct dosa_plan {
  dosa::Plan plan;
  std::string text;
};

namespace {

using namespace dosa;

// The enumerations are the C++ ones, number by number.
static_assert(DOSA_F8_E4M3 == static_cast<int>(DType::f8_e4m3) && DOSA_I32 == static_cast<int>(DType::i32));
static_assert(DOSA_CUDA == static_cast<int>(Device::cuda) && DOSA_CUDA == static_cast<int>(Backend::cuda));
static_assert(DOSA_METHOD_DENSE == static_cast<int>(Method::dense) &&
              DOSA_METHOD_DOSA == static_cast<int>(Method::dosa));
static_assert(DOSA_FORM_BASE == static_cast<int>(Form::base) && DOSA_FORM_EXTENDED == static_cast<int>(Form::extended));
static_assert(DOSA_SEEDS_CHAIN == static_cast<int>(SeedPolicy::chain) &&
              DOSA_SEEDS_SAMPLE == static_cast<int>(SeedPolicy::sample));
static_assert(DOSA_PRECISION_I8 == static_cast<int>(ScreenPrecision::i8));
static_assert(DOSA_ORDER_ASCENDING == static_cast<int>(Order::ascending));
static_assert(DOSA_IDS_SLOT == static_cast<int>(IndexSpace::slot));
static_assert(DOSA_VERIFICATION_FAILED == static_cast<int>(ErrorCode::verification_failed));

thread_local std::string last_error;
thread_local std::string last_reason;
thread_local std::string last_name;

dosa_status complain(dosa_status status, std::string message) {
  last_error = std::move(message);
  return status;
}

dosa_status complain(const Error& error) { return complain(static_cast<dosa_status>(error.code), error.message); }

/// Runs `body`, which returns a status; what it throws becomes one.
template <typename Body>
dosa_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    last_error.clear();
    last_error = "out of memory";  // short enough to need none
    return DOSA_OUT_OF_MEMORY;
  } catch (const std::exception& exception) {
    last_error = "bug of dosa";
    return complain(DOSA_INTERNAL, exception.what());
  }
}

/// Collects the first thing wrong with the arguments of a call.
class Arguments {
 public:
  template <typename Struct>
  void sized(const char* name, const Struct* value) {
    if (value == nullptr) return refuse(fmt::format("{} is NULL", name));
    if (value->size != sizeof(Struct)) {
      refuse(fmt::format("{}.size is {}; this library's struct has {} bytes", name, value->size, sizeof(Struct)));
    }
  }

  void not_null(const char* name, const void* value) {
    if (value == nullptr) refuse(fmt::format("{} is NULL", name));
  }

  template <typename Enum>
  Enum choice(const char* name, std::int32_t value, Enum last) {
    if (value < 0 || value > static_cast<std::int32_t>(last)) {
      refuse(fmt::format("{} is {}; allowed are 0..{}", name, value, static_cast<std::int32_t>(last)));
      return Enum{};
    }
    return static_cast<Enum>(value);
  }

  template <typename Void>
  BasicTensorView<Void> view(const char* name, const dosa_tensor& tensor) {
    BasicTensorView<Void> view;
    if (tensor.rank < 0 || tensor.rank > view.max_rank) {
      refuse(fmt::format("rank of {} is {}; allowed are 0..{}", name, tensor.rank, view.max_rank));
      return view;
    }
    view.data = const_cast<void*>(tensor.data);  // the output structs are documented to be written through
    view.rank = tensor.rank;
    if (tensor.rank == 0) return view;
    view.dtype = choice(fmt::format("dtype of {}", name).c_str(), tensor.dtype, DType::i32);
    view.device = choice(fmt::format("device of {}", name).c_str(), tensor.device, Device::cuda);
    std::ranges::copy(tensor.shape, view.shape.begin());
    std::ranges::copy(tensor.stride, view.stride.begin());
    return view;
  }

  template <typename Void>
  BasicTensorView<Void> view(const char* name, const dosa_tensor* tensor) {
    not_null(name, tensor);
    return tensor == nullptr ? BasicTensorView<Void>{} : view<Void>(name, *tensor);
  }

  [[nodiscard]] bool wrong() const noexcept { return !problem_.empty(); }
  dosa_status status() { return complain(DOSA_INVALID_ARGUMENT, std::move(problem_)); }

 private:
  void refuse(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }

  std::string problem_;
};

Options options_of(const dosa_options& c, Arguments& arguments) {
  Options options;
  options.method = arguments.choice("method", c.method, Method::dosa);
  options.backend = arguments.choice("backend", c.backend, Backend::cuda);
  options.certificate.form = arguments.choice("form", c.form, Form::extended);
  options.certificate.row_budget = c.row_budget;
  options.certificate.aggregates = c.aggregates;
  options.certificate.precision = arguments.choice("precision", c.precision, ScreenPrecision::i8);
  options.seeds = arguments.choice("seeds", c.seeds, SeedPolicy::sample);
  options.order = arguments.choice("order", c.order, Order::ascending);
  options.index_space = arguments.choice("index_space", c.index_space, IndexSpace::slot);
  options.threads = c.threads;
  if (c.implementation != nullptr) options.implementation = c.implementation;
  options.memory_budget = c.memory_budget;
  options.min_context = c.min_context;
  options.verify_rows = c.verify_rows;
  options.time_stages = c.time_stages != 0;
  return options;
}

template <typename Void>
dosa_tensor tensor_of(const BasicTensorView<Void>& view) {
  dosa_tensor tensor{view.data, static_cast<std::int32_t>(view.dtype), static_cast<std::int32_t>(view.device), view.rank, 0, {}, {}};
  std::ranges::copy(view.shape, tensor.shape);
  std::ranges::copy(view.stride, tensor.stride);
  return tensor;
}

dosa_status status_of(const Result<void>& result) { return result ? DOSA_OK : complain(result.error()); }

Problem problem_of(const dosa_problem& c, Arguments& arguments) {
  Problem problem;
  problem.q = arguments.view<const void>("q", c.q);
  problem.k = arguments.view<const void>("k", c.k);
  problem.k_scale = arguments.view<const void>("k_scale", c.k_scale);
  problem.w = arguments.view<const void>("w", c.w);
  problem.ks = arguments.view<const void>("ks", c.ks);
  problem.ke = arguments.view<const void>("ke", c.ke);
  problem.hints = arguments.view<const void>("hints", c.hints);
  problem.kv_cache = arguments.view<const void>("kv_cache", c.kv_cache);
  problem.block_table = arguments.view<const void>("block_table", c.block_table);
  problem.requests = arguments.view<const void>("requests", c.requests);
  problem.topk = c.topk;
  return problem;
}

void report(const Stats& stats, dosa_stats& c) {
  const std::size_t size = c.size;
  const PathCounts& path = stats.path;
  c = {size,
       stats.rows,
       stats.clamped_rows,
       path.empty,
       path.short_rows,
       path.dosa,
       path.full,
       path.full_context,
       path.full_loose,
       path.full_exempt,
       stats.visible,
       stats.seeds,
       stats.screened,
       stats.survivors,
       stats.refined,
       stats.full,
       stats.exempt,
       stats.predicted_work,
       stats.planned_rows,
       stats.seconds_seed,
       stats.seconds_certify,
       stats.seconds_screen,
       stats.seconds_refine,
       stats.seconds_select,
       stats.seconds_score};
}

}  // namespace

int32_t dosa_abi_version(void) { return DOSA_ABI_VERSION; }

const char* dosa_version(void) { return dosa::version(); }

const char* dosa_last_error(void) { return last_error.c_str(); }

const char* dosa_unavailable_reason(int32_t backend) {
  const dosa_status status = guarded([&] {
    const bool known = backend == DOSA_CPU || backend == DOSA_CUDA;
    last_reason =
        known ? unavailable_reason(static_cast<Backend>(backend)) : fmt::format("there is no backend {}", backend);
    return DOSA_OK;
  });
  return status == DOSA_OK ? last_reason.c_str() : last_error.c_str();
}

const char* dosa_cpu_implementation(int32_t index) {
  const dosa_status status = guarded([&] {
    const auto names = cpu_implementations();
    if (index < 0 || static_cast<std::size_t>(index) >= names.size()) return DOSA_INVALID_ARGUMENT;
    last_name = names[static_cast<std::size_t>(index)];
    return DOSA_OK;
  });
  return status == DOSA_OK ? last_name.c_str() : nullptr;
}

dosa_options dosa_default_options(void) {
  const Options options;
  dosa_options c{};
  c.size = sizeof c;
  c.memory_budget = options.memory_budget;
  return c;  // every other default is 0, DOSA_..._AUTO or NULL
}

dosa_status dosa_indexer_create(const dosa_options* options, dosa_indexer** indexer) {
  return guarded([&] {
    const dosa_options defaults = dosa_default_options();
    const dosa_options* chosen = options == nullptr ? &defaults : options;
    Arguments arguments;
    arguments.not_null("indexer", indexer);
    arguments.sized("options", chosen);
    if (arguments.wrong()) return arguments.status();
    const Options converted = options_of(*chosen, arguments);
    if (arguments.wrong()) return arguments.status();
    auto created = Indexer::create(converted);
    if (!created) return complain(created.error());
    *indexer = new dosa_indexer{std::move(*created)};
    return DOSA_OK;
  });
}

void dosa_indexer_destroy(dosa_indexer* indexer) { delete indexer; }

dosa_status dosa_plan_create(const dosa_indexer* indexer, const dosa_shape* shape, dosa_plan** plan) {
  return guarded([&] {
    Arguments arguments;
    arguments.not_null("indexer", indexer);
    arguments.not_null("plan", plan);
    arguments.sized("shape", shape);
    if (arguments.wrong()) return arguments.status();
    auto planned = indexer->indexer.plan(
        {shape->nq, shape->nk, shape->heads, shape->dim, shape->topk, shape->page_size > 0 ? shape->requests : 1, shape->page_size});
    if (!planned) return complain(planned.error());
    *plan = new dosa_plan{std::move(*planned), {}};
    (*plan)->text = (*plan)->plan.describe();
    return DOSA_OK;
  });
}

void dosa_plan_destroy(dosa_plan* plan) { delete plan; }

size_t dosa_plan_workspace_bytes(const dosa_plan* plan) { return plan->plan.workspace_bytes; }

const char* dosa_plan_describe(const dosa_plan* plan) { return plan->text.c_str(); }

dosa_status dosa_run(const dosa_indexer* indexer, const dosa_plan* plan, const dosa_problem* problem,
                     const dosa_selection* selection, void* workspace, size_t workspace_bytes, void* stream,
                     dosa_stats* stats) {
  return guarded([&] {
    Arguments arguments;
    arguments.not_null("indexer", indexer);
    arguments.not_null("plan", plan);
    arguments.sized("problem", problem);
    arguments.sized("selection", selection);
    if (stats != nullptr) arguments.sized("stats", stats);
    if (arguments.wrong()) return arguments.status();
    const Problem input = problem_of(*problem, arguments);
    const Selection output{arguments.view<void>("ids", selection->ids),
                           arguments.view<void>("scores", selection->scores),
                           arguments.view<void>("recent", selection->recent)};
    if (arguments.wrong()) return arguments.status();
    const auto ran = indexer->indexer.run(plan->plan, input, output, {workspace, workspace_bytes, stream});
    if (!ran) return complain(ran.error());
    if (stats != nullptr) report(*ran, *stats);
    return DOSA_OK;
  });
}

dosa_status dosa_counters(const dosa_indexer* indexer, const dosa_plan* plan, void* workspace, size_t workspace_bytes,
                          void* stream, dosa_stats* stats) {
  return guarded([&] {
    Arguments arguments;
    arguments.not_null("indexer", indexer);
    arguments.not_null("plan", plan);
    arguments.not_null("workspace", workspace);
    arguments.sized("stats", stats);
    if (arguments.wrong()) return arguments.status();
    const auto counted = indexer->indexer.counters(plan->plan, {workspace, workspace_bytes, stream});
    if (!counted) return complain(counted.error());
    report(*counted, *stats);
    return DOSA_OK;
  });
}

dosa_status dosa_decode_problem(const dosa_decode_step* step, dosa_problem* problem) {
  return guarded([&] {
    Arguments arguments;
    arguments.sized("step", step);
    arguments.sized("problem", problem);
    if (arguments.wrong()) return arguments.status();
    const auto made = decode_problem({.q = arguments.view<const void>("q", step->q),
                                      .w = arguments.view<const void>("w", step->w),
                                      .kv_cache = arguments.view<const void>("kv_cache", step->kv_cache),
                                      .block_table = arguments.view<const void>("block_table", step->block_table),
                                      .context_lens = arguments.view<const void>("context_lens", step->context_lens),
                                      .topk = step->topk});
    if (arguments.wrong()) return arguments.status();
    if (!made) return complain(made.error());
    *problem = {};
    problem->size = sizeof *problem;
    problem->q = tensor_of(made->q);
    problem->w = tensor_of(made->w);
    problem->ke = tensor_of(made->ke);
    problem->kv_cache = tensor_of(made->kv_cache);
    problem->block_table = tensor_of(made->block_table);
    problem->topk = made->topk;
    return DOSA_OK;
  });
}

dosa_status dosa_insert_keys(const dosa_tensor* kv_cache, const dosa_tensor* keys, const dosa_tensor* slots, int32_t scale_rule,
                             float floor) {
  return guarded([&] {
    Arguments arguments;
    const auto cache = arguments.view<void>("kv_cache", kv_cache);
    const auto rows = arguments.view<const void>("keys", keys);
    const auto places = arguments.view<const void>("slots", slots);
    const QuantizeRule rule{arguments.choice("scale_rule", scale_rule, ScaleRule::power_of_two), floor};
    return arguments.wrong() ? arguments.status() : status_of(insert_keys(cache, rows, places, rule));
  });
}

dosa_status dosa_gather_keys(const dosa_tensor* kv_cache, const dosa_tensor* blocks, int64_t first, const dosa_tensor* k,
                             const dosa_tensor* k_scale) {
  return guarded([&] {
    Arguments arguments;
    const auto cache = arguments.view<const void>("kv_cache", kv_cache);
    const auto pages = arguments.view<const void>("blocks", blocks);
    const auto keys = arguments.view<void>("k", k);
    const auto scales = arguments.view<void>("k_scale", k_scale);
    return arguments.wrong() ? arguments.status() : status_of(gather_keys(cache, pages, first, keys, scales));
  });
}

dosa_status dosa_move_keys(const dosa_tensor* from, const dosa_tensor* from_slots, const dosa_tensor* to,
                           const dosa_tensor* to_slots) {
  return guarded([&] {
    Arguments arguments;
    const auto source = arguments.view<const void>("from", from);
    const auto taken = arguments.view<const void>("from_slots", from_slots);
    const auto target = arguments.view<void>("to", to);
    const auto given = arguments.view<const void>("to_slots", to_slots);
    return arguments.wrong() ? arguments.status() : status_of(move_keys(source, taken, target, given));
  });
}

dosa_status dosa_dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(const dosa_tensor* q_index_fp8, const dosa_tensor* k_index_cache_fp8,
                                                             const dosa_tensor* weights, const dosa_tensor* seq_lens,
                                                             const dosa_tensor* block_table, const dosa_tensor* topk_indices) {
  return guarded([&] {
    Arguments arguments;
    const auto q = arguments.view<const void>("q_index_fp8", q_index_fp8);
    const auto cache = arguments.view<const void>("k_index_cache_fp8", k_index_cache_fp8);
    const auto w = arguments.view<const void>("weights", weights);
    const auto lens = arguments.view<const void>("seq_lens", seq_lens);
    const auto table = arguments.view<const void>("block_table", block_table);
    const auto ids = arguments.view<void>("topk_indices", topk_indices);
    if (arguments.wrong()) return arguments.status();
    return status_of(dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(q, cache, w, lens, table, ids));
  });
}
