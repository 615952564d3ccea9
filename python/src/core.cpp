// dosa._core: the C++ interface for the Python files beside it, which document it, pick defaults and make arrays.
#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include "arrays.hpp"
#include "base/keys.hpp"
#include "base/parallel.hpp"
#include "dosa/indexer.hpp"
#include "dosa/pages.hpp"
#include "errors.hpp"
#include "explain.hpp"
#include "io/run_json.hpp"
#include "io/trace.hpp"
#include "options.hpp"
#include "score/oracle.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace dosa::python {
namespace {

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    const nb::object error =
        nb::module_::import_("dosa._errors").attr("of_code")(static_cast<int>(failure.code), failure.what());
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
}

/// Refuses whatever a run would refuse, apart from its workspace; reads and writes no array.
void check(const Indexer& indexer, const Plan& plan, const Problem& problem, const Selection& out) {
  const auto ran = indexer.run(plan, problem, out, {});
  if (!ran && ran.error().code != ErrorCode::workspace_too_small) throw Failure(ran.error());
}

/// Output of the right shape that nobody writes.
Selection no_output(const Problem& problem) {
  static std::int32_t unused = 0;
  MutableTensorView ids = dense_view<void>(&unused, DType::i32, {problem.q.shape[0], problem.topk}, problem.q.device);
  ids.stride = {};
  return {ids, {}};
}

class PyIndexer {
 public:
  explicit PyIndexer(const nb::dict& options) {
    set_options(owned_, options);
    indexer_.emplace(value_of(Indexer::create(owned_.options)));
  }

  [[nodiscard]] Plan plan(std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim, std::int32_t topk,
                          std::int64_t requests, std::int32_t page_size) const {
    return value_of(indexer_->plan({nq, nk, heads, dim, topk, requests, page_size}));
  }

  Stats run(const Plan& plan, const nb::tuple& problem, nb::handle ids, nb::handle scores, nb::handle recent,
            nb::handle workspace, std::uintptr_t stream) {
    Arrays arrays;
    const Problem input = arrays.problem(problem, plan.shape.topk);
    const Selection output{arrays.output("ids", ids), arrays.output("scores", scores), arrays.output("recent", recent)};
    const Workspace scratch = workspace_of(arrays, workspace, stream);
    return alone([&] { return indexer_->run(plan, input, output, scratch); });
  }

  Stats counters(const Plan& plan, nb::handle workspace, std::uintptr_t stream) {
    Arrays arrays;
    const Workspace scratch = workspace_of(arrays, workspace, stream);
    return alone([&] { return indexer_->counters(plan, scratch); });
  }

  void check(const Plan& plan, const nb::tuple& problem, nb::handle ids) const {
    Arrays arrays;
    const Problem input = arrays.problem(problem, plan.shape.topk);
    Selection output = no_output(input);
    if (!ids.is_none()) output.ids = arrays.output("ids", ids);
    python::check(*indexer_, plan, input, output);
  }

 private:
  static Workspace workspace_of(Arrays& arrays, nb::handle workspace, std::uintptr_t stream) {
    const MutableTensorView bytes = arrays.output("workspace", workspace);
    if (bytes.rank != 1 || bytes.dtype != DType::f8_e4m3 || bytes.stride[0] != 1) {
      refuse("workspace must be a contiguous one-dimensional uint8 array");
    }
    return {bytes.data, static_cast<std::size_t>(bytes.shape[0]), reinterpret_cast<void*>(stream)};
  }

  /// An Indexer serves one thread at a time; Python's other threads go on meanwhile.
  template <typename Work>
  Stats alone(Work work) {
    const nb::gil_scoped_release released;
    const std::scoped_lock lock(busy_);
    return value_of(work());
  }

  OwnedOptions owned_;
  std::optional<Indexer> indexer_;
  std::mutex busy_;
};

/// Oracle rows of a problem that a run would accept, on several threads.
template <typename Take>
void ask_oracle(const Problem& problem, const std::vector<std::int64_t>& rows, const std::string& reference,
                Order order, IndexSpace space, std::int32_t threads, Take take) {
  const ReferenceScorer scorer = reference_of(reference);
  Options options;
  options.threads = threads;
  const Indexer indexer = value_of(Indexer::create(options));
  ProblemShape shape = shape_of(problem);
  shape.topk = std::min(shape.topk, 1);
  Problem one = problem;
  one.topk = shape.topk;
  const Plan plan = value_of(indexer.plan(shape));
  check(indexer, plan, one, no_output(one));
  for (const std::int64_t row : rows) {
    if (row < 0 || row >= shape.nq) refuse(fmt::format("row {} does not exist; there are {}", row, shape.nq));
  }
  const nb::gil_scoped_release released;
  std::atomic<std::size_t> next = 0;
  const auto workers =
      static_cast<int>(std::clamp<std::size_t>(rows.size(), 1, static_cast<std::size_t>(plan.threads)));
  ForkJoin(plan.threads).for_each_worker(workers, [&](int) {
    for (std::size_t i = next++; i < rows.size(); i = next++)
      take(i, oracle_row(problem, rows[i], scorer, order, space));
  });
}

void demand(const char* name, const MutableTensorView& view, DType dtype, std::int64_t rows, std::int64_t columns) {
  if (view.dtype == dtype && view.device == Device::cpu && view.rank == 2 && view.shape[0] == rows &&
      view.shape[1] == columns)
    return;
  refuse(fmt::format("{} must be a {} array of shape [{}, {}] in host memory", name, name_of(dtype), rows, columns));
}

void oracle(const nb::tuple& problem, std::int32_t topk, const std::vector<std::int64_t>& rows,
            const std::string& reference, const std::string& order, const std::string& index_space,
            std::int32_t threads, nb::handle ids, nb::handle scores) {
  Arrays arrays;
  const Problem input = arrays.problem(problem, topk);
  const MutableTensorView to_ids = arrays.output("ids", ids), to_scores = arrays.output("scores", scores);
  const auto count = static_cast<std::int64_t>(rows.size());
  demand("ids", to_ids, DType::i32, count, topk);
  demand("scores", to_scores, DType::f32, count, topk);
  ask_oracle(input, rows, reference, order_of(order), index_space_of(index_space), threads,
             [&](std::size_t i, const OracleRow& row) {
               for (std::size_t slot = 0; slot < row.ids.size(); ++slot) {
                 *to_ids.at<std::int32_t>(i, slot) = row.ids[slot];
                 *to_scores.at<float>(i, slot) = row.scores[slot];
               }
             });
}

void scores(const nb::tuple& problem, const std::vector<std::int64_t>& rows, const std::string& reference,
            std::int32_t threads, nb::handle scores) {
  Arrays arrays;
  Problem input = arrays.problem(problem, 1);
  const std::int64_t nk = key_count(input);
  const MutableTensorView out = arrays.output("scores", scores);
  demand("scores", out, DType::f32, static_cast<std::int64_t>(rows.size()), nk);
  input.topk = static_cast<std::int32_t>(nk);  // the oracle has no limit: every visible key
  ask_oracle(input, rows, reference, Order::ascending, IndexSpace::absolute, threads,
             [&](std::size_t i, const OracleRow& row) {
               for (std::int64_t key = 0; key < nk; ++key)
                 *out.at<float>(i, key) = -std::numeric_limits<float>::infinity();
               for (std::size_t slot = 0; slot < row.ids.size() && row.ids[slot] >= 0; ++slot) {
                 *out.at<float>(i, row.ids[slot]) = row.scores[slot];
               }
             });
}

std::string explain(const nb::tuple& problem, std::int32_t topk, const nb::dict& options,
                    const std::vector<std::int64_t>& rows, std::int32_t sampled_keys, std::int32_t rounds,
                    double indexer_share, bool with_audit) {
  Arrays arrays;
  const Problem input = arrays.problem(problem, topk);
  OwnedOptions owned;
  set_options(owned, options);
  {
    const Indexer indexer = value_of(Indexer::create(owned.options));
    check(indexer, value_of(indexer.plan(shape_of(input))), input, no_output(input));
  }
  const nb::gil_scoped_release released;
  const Explanation explanation = value_of(
      dosa::explain(input, {.run = owned.options, .rows = rows, .sampled_keys = sampled_keys, .rounds = rounds}));
  JsonObject line("explain");
  add_explanation(line, explanation, indexer_share);
  if (with_audit) line.add("audit", json_of(audit(explanation.rows)));
  return line.line();
}

/// A mapped file, and what keeps it mapped for the arrays over it.
std::pair<const Trace*, nb::capsule> open_trace(const std::string& path) {
  auto* trace = new Trace(value_of(Trace::open(path)));
  return {trace, nb::capsule(trace, [](void* pointer) noexcept { delete static_cast<Trace*>(pointer); })};
}

nb::tuple load_trace(const std::string& path) {
  const auto [trace, owner] = open_trace(path);
  const Problem& p = trace->problem();
  if (is_paged(p)) {
    throw Failure({ErrorCode::bad_file, path + ": its keys are in pages (kv_cache); load_decode_trace maps such traces"});
  }
  return nb::make_tuple(to_numpy(p.q, owner), to_numpy(p.k, owner), to_numpy(p.k_scale, owner), to_numpy(p.w, owner),
                        to_numpy(p.ks, owner), to_numpy(p.ke, owner), trace->metadata());
}

/// A list of (q, kv_cache, w, context_lens, block_table), one for each step, and the metadata.
nb::tuple load_decode_trace(const std::string& path) {
  const auto [trace, owner] = open_trace(path);
  nb::list steps;
  for (std::int64_t step = 0; step < trace->steps(); ++step) {
    const Problem p = trace->problem(step);
    if (!is_paged(p)) {
      throw Failure({ErrorCode::bad_file, path + ": its keys are contiguous (k); load_trace maps such traces"});
    }
    steps.append(nb::make_tuple(to_numpy(p.q, owner), to_numpy(p.kv_cache, owner), to_numpy(p.w, owner),
                                to_numpy(p.ke, owner), to_numpy(p.block_table, owner)));
  }
  return nb::make_tuple(steps, trace->metadata());
}

void insert_keys(nb::handle kv_cache, nb::handle keys, nb::handle slots, bool power_of_two, float floor) {
  Arrays arrays;
  const QuantizeRule rule{power_of_two ? ScaleRule::power_of_two : ScaleRule::amax, floor};
  value_of(dosa::insert_keys(arrays.output("kv_cache", kv_cache), arrays.input("keys", keys), arrays.input("slots", slots),
                             rule));
}

void gather_keys(nb::handle kv_cache, nb::handle blocks, std::int64_t first, nb::handle k, nb::handle k_scale) {
  Arrays arrays;
  value_of(dosa::gather_keys(arrays.input("kv_cache", kv_cache), arrays.input("blocks", blocks), first,
                             arrays.output("k", k), arrays.output("k_scale", k_scale)));
}

void move_keys(nb::handle from, nb::handle from_slots, nb::handle to, nb::handle to_slots) {
  Arrays arrays;
  value_of(dosa::move_keys(arrays.input("from", from), arrays.input("from_slots", from_slots), arrays.output("to", to),
                           arrays.input("to_slots", to_slots)));
}

void save_trace(const std::string& path, const nb::tuple& problem, const Metadata& metadata) {
  Arrays arrays;
  const Problem input = arrays.problem(problem, 1);
  const Indexer indexer = value_of(Indexer::create());
  check(indexer, value_of(indexer.plan(shape_of(input))), input, no_output(input));
  value_of(dosa::save_trace(path, input, metadata));
}

void bind_stats(nb::module_& m) {
  nb::class_<PathCounts>(m, "PathCounts", "Rows by the path they took, and why.")
      .def_ro("empty", &PathCounts::empty, "nothing visible")
      .def_ro("short_rows", &PathCounts::short_rows, "at most topk visible keys: every one wins")
      .def_ro("dosa", &PathCounts::dosa, "screened by a certificate")
      .def_ro("full", &PathCounts::full, "scored in full because the method says so")
      .def_ro("full_context", &PathCounts::full_context, "scored in full: fewer visible keys than min_context")
      .def_ro("full_loose", &PathCounts::full_loose, "scored in full: a certificate would reject too little to pay")
      .def_ro("full_exempt", &PathCounts::full_exempt, "scored in full: query data without a certificate");
  nb::class_<Stats>(m, "Stats", "What a run took; counts are of query-key pairs where nothing else is said.")
      .def_ro("rows", &Stats::rows, "queries")
      .def_ro("clamped_rows", &Stats::clamped_rows, "rows whose ks or ke lay outside [0, keys]")
      .def_ro("path", &Stats::path, "rows by path")
      .def_ro("visible", &Stats::visible, "what full scoring scores")
      .def_ro("seeds", &Stats::seeds, "scored before any bound was compared")
      .def_ro("screened", &Stats::screened, "compared by bound")
      .def_ro("survivors", &Stats::survivors, "bound not below the tau of the time")
      .def_ro("refined", &Stats::refined, "survivors scored in full")
      .def_ro("full", &Stats::full, "scored in full without screening")
      .def_ro("exempt", &Stats::exempt, "keys that always survive")
      .def_ro("bound_rows", &Stats::bound_rows, "sum over screened rows of the row budget")
      .def_ro("compactions", &Stats::compactions, "times a full record buffer was compacted exactly")
      .def_ro("predicted_work", &Stats::predicted_work, "relative to full scoring, summed over planned_rows")
      .def_ro("planned_rows", &Stats::planned_rows, "rows in predicted_work")
      .def_ro("seconds_seed", &Stats::seconds_seed, "thread-seconds")
      .def_ro("seconds_certify", &Stats::seconds_certify, "thread-seconds")
      .def_ro("seconds_screen", &Stats::seconds_screen, "thread-seconds")
      .def_ro("seconds_refine", &Stats::seconds_refine, "thread-seconds")
      .def_ro("seconds_select", &Stats::seconds_select, "thread-seconds")
      .def_ro("seconds_score", &Stats::seconds_score, "thread-seconds of full scoring")
      .def(
          "json", [](const Stats& stats) { return json_of(stats).line(); }, "The same as a JSON object on one line.")
      .def("__repr__", [](const Stats& stats) { return fmt::format("Stats({})", json_of(stats).line()); });
}

void bind_indexer(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "Every size of a run; made by Indexer.plan, never changed, may be shared.")
      .def_ro("workspace_bytes", &Plan::workspace_bytes, "bytes of workspace that a run needs")
      .def_ro("threads", &Plan::threads, "workers")
      .def_ro("implementation", &Plan::implementation, "name of the kernels that will run")
      .def_prop_ro(
          "method", [](const Plan& plan) { return std::string(name_in(kMethods, plan.options.method)); },
          "method that will run; \"auto\" chooses row by row")
      .def_ro("reason", &Plan::reason, "why \"auto\" became what `method` says; else empty")
      .def_prop_ro(
          "min_context", [](const Plan& plan) { return plan.options.min_context; },
          "method auto scores rows in full that see fewer keys")
      .def_prop_ro(
          "nq", [](const Plan& plan) { return plan.shape.nq; }, "queries")
      .def_prop_ro(
          "nk", [](const Plan& plan) { return plan.shape.nk; }, "keys")
      .def_prop_ro(
          "heads", [](const Plan& plan) { return plan.shape.heads; }, "indexer heads")
      .def_prop_ro(
          "dim", [](const Plan& plan) { return plan.shape.dim; }, "components of a head")
      .def_prop_ro(
          "topk", [](const Plan& plan) { return plan.shape.topk; }, "keys kept per query")
      .def_prop_ro(
          "requests", [](const Plan& plan) { return plan.shape.requests; }, "rows of the block table; 1 without pages")
      .def_prop_ro(
          "page_size", [](const Plan& plan) { return plan.shape.page_size; }, "keys of a page; 0 without pages")
      .def("__repr__", [](const Plan& plan) { return fmt::format("Plan({})", plan.describe()); });
  nb::class_<PyIndexer>(m, "Indexer")
      .def(nb::init<const nb::dict&>(), "options"_a)
      .def("plan", &PyIndexer::plan, "nq"_a, "nk"_a, "heads"_a, "dim"_a, "topk"_a, "requests"_a, "page_size"_a,
           nb::keep_alive<0, 1>())
      .def("run", &PyIndexer::run, "plan"_a, "problem"_a, "ids"_a, "scores"_a.none(), "recent"_a.none(), "workspace"_a,
           "stream"_a)
      .def("counters", &PyIndexer::counters, "plan"_a, "workspace"_a, "stream"_a)
      .def("check", &PyIndexer::check, "plan"_a, "problem"_a, "ids"_a.none());
}

}  // namespace
}  // namespace dosa::python

NB_MODULE(_core, m) {
  using namespace dosa::python;
  nb::register_exception_translator(translate);
  bind_stats(m);
  bind_indexer(m);
  m.def("version", [] { return std::string(dosa::version()); });
  m.def("cpu_implementations", &dosa::cpu_implementations);
  m.def(
      "unavailable_reason", [](const std::string& backend) { return dosa::unavailable_reason(backend_of(backend)); },
      "backend"_a);
  m.def("oracle", &oracle, "problem"_a, "topk"_a, "rows"_a, "reference"_a, "order"_a, "index_space"_a, "threads"_a,
        "ids"_a, "scores"_a);
  m.def("scores", &scores, "problem"_a, "rows"_a, "reference"_a, "threads"_a, "out"_a);
  m.def("explain", &explain, "problem"_a, "topk"_a, "options"_a, "rows"_a, "sampled_keys"_a, "rounds"_a,
        "indexer_share"_a, "audit"_a);
  m.def("load_trace", &load_trace, "path"_a);
  m.def("load_decode_trace", &load_decode_trace, "path"_a);
  m.def("insert_keys", &insert_keys, "kv_cache"_a, "keys"_a, "slots"_a, "power_of_two"_a, "floor"_a);
  m.def("gather_keys", &gather_keys, "kv_cache"_a, "blocks"_a, "first"_a, "k"_a, "k_scale"_a);
  m.def("move_keys", &move_keys, "from"_a, "from_slots"_a, "to"_a, "to_slots"_a);
  m.def("save_trace", &save_trace, "path"_a, "problem"_a, "metadata"_a);
}
