// How it is computed. No option changes a result's ids or scores, except `order` and `index_space`, which arrange them.
#pragma once

#include <cstdint>
#include <string_view>

namespace dosa {

enum class Method : std::uint8_t {
  automatic,  ///< dosa where it pays, else dense; Stats says which and why
  dense,      ///< score every visible key, keep the scores, then select
  fused,      ///< score every visible key, keep only what may still win
  dosa,       ///< certified early rejection
};

enum class Backend : std::uint8_t { cpu, cuda };

enum class Form : std::uint8_t {
  automatic,  ///< the cheapest form by predicted work, per query group
  base,       ///< anchors for omitted positive heads, one joint residual, -[a.k]+ for omitted negative heads
  absolute,   ///< only for rows that keep every positive head: the linear half of a head is exact
  extended,   ///< the absolute form carried over to omitted positive heads
};

enum class SeedPolicy : std::uint8_t {
  automatic,       ///< largest_bounds; chain when the keys of a query do not fit one slice; sample on cuda
  nearest_spread,  ///< K nearest and K evenly spread keys: needs no history, gives a low tau
  chain,           ///< winners of an earlier query, or the caller's hints, plus the nearest keys
  largest_bounds,  ///< bound every key first, then score exactly the keys with the largest bounds
  sample,          ///< cuda: tau is guessed from the scores of evenly spread keys and checked in the end
};

enum class ScreenPrecision : std::uint8_t {
  automatic,  ///< i8 where the CPU has a byte dot product and it is predicted to be cheaper, else f32
  f32,        ///< bound rows in the scorer's own arithmetic
  i8,         ///< bound rows and keys rounded to integers, the rounding bounded in the certificate
};

enum class Order : std::uint8_t {
  score,      ///< best first; equal scores by ascending id
  ascending,  ///< by id; a row with at most K visible keys is then the identity and scores nothing
};

enum class IndexSpace : std::uint8_t {
  absolute,  ///< ids are rows of k; of paged keys, positions in the request
  relative,  ///< ids count from max(ks, 0)
  slot,      ///< paged keys: page * page_size + offset, the key's place in the pool
};

/// What a part of the certificate is worth: the bound without it, valid all the same. For experiments.
enum class Ablation : std::uint8_t {
  none,
  no_aggregate,    ///< omitted negative heads are bounded by 0
  all_aggregated,  ///< all of them are in the aggregate, whether their dots tend to be positive or not
  no_projection,   ///< omitted positive heads lean on no anchor
};

struct CertificateOptions {
  Form form = Form::automatic;
  std::int32_t row_budget = 0;   ///< bound rows, retained heads plus auxiliary rows; 0: chosen per query group
  std::int32_t aggregates = 0;   ///< groups of omitted negative heads, 1..4; 0: chosen per query group
  ScreenPrecision precision = ScreenPrecision::automatic;
  Ablation ablation = Ablation::none;
};

struct Options {
  Method method = Method::automatic;
  Backend backend = Backend::cpu;
  CertificateOptions certificate;
  SeedPolicy seeds = SeedPolicy::automatic;
  Order order = Order::score;
  IndexSpace index_space = IndexSpace::absolute;

  /// Workers; 0: one per CPU this process may use.
  std::int32_t threads = 0;
  /// CPU implementation by name (see cpu_implementations()); empty: the fastest this CPU runs.
  std::string_view implementation;
  /// Upper bound of the workspace in bytes. 4 GiB is what serving engines already grant to score buffers.
  std::int64_t memory_budget = std::int64_t{4} << 30;
  /// `automatic` takes the dense path for rows that see fewer keys; 0: 3 topk + 4096 (cuda: 32768), below which seeding
  /// and planning were measured to cost more than screening saves.
  std::int64_t min_context = 0;
  /// Debug mode: after the run, recompute this many rows, evenly spread, densely and fail with verification_failed on
  /// the first difference. 0: off.
  std::int64_t verify_rows = 0;
  /// Benchmarks: cuda times every stage, waits for the stream at the end of a run and fills the seconds of Stats, which the
  /// cpu backend always does. Not for graph capture.
  bool time_stages = false;
};

}  // namespace dosa
