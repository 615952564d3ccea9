// What comes back: ids, scores, what it took, and errors a person can act on.
#pragma once

#include <cstdint>
#include <string>

#include <tl/expected.hpp>

#include "dosa/options.hpp"
#include "dosa/tensor.hpp"

namespace dosa {

enum class ErrorCode : std::uint8_t {
  invalid_argument = 1,    ///< a dtype, shape, stride or option is wrong
  unsupported_shape = 2,   ///< legal, but outside what this backend computes
  unsupported_device = 3,  ///< the backend, instruction set or GPU is not available here
  workspace_too_small = 4,
  memory_budget = 5,        ///< the smallest workspace is larger than Options::memory_budget
  io = 6,                   ///< a file could not be read or written
  bad_file = 7,             ///< a file is not what it claims to be
  verification_failed = 8,  ///< Options::verify_rows found a difference: a bug of ours
};

struct Error {
  ErrorCode code;
  std::string message;  ///< one line: the value seen and what is allowed
};

template <typename T>
using Result = tl::expected<T, Error>;

/// Where the results go. Rows may be padded (row stride free); the output may not overlap inputs or workspace.
/// Every row gets exactly min(visible, K) valid ids, then -1; scores of the -1 slots are -inf, a NaN score is 0x7FC00000.
struct Selection {
  MutableTensorView ids;     ///< i32 [nq, K]
  MutableTensorView scores;  ///< f32 [nq, K]; absent: not wanted
  /// i32 [requests, m], recent winners of every request: read as hints where the problem has none, then the winners of the
  /// request's last query that sees a key are put in front (absolute ids, newest first, distinct, -1 behind). Any contents
  /// are legal. One row per request, unit stride along it; the caller may fill it with -1, move it to another request, copy
  /// it, or let requests share one. m = 9/8 K serves well; more than 2 K ids are not used, and more than 8192 not kept on a
  /// GPU. Absent: not wanted.
  MutableTensorView recent{};
};

/// Why rows took the path they took; one count per row.
struct PathCounts {
  std::int64_t empty = 0;         ///< nothing visible
  std::int64_t short_rows = 0;    ///< visible <= K: every visible key wins
  std::int64_t dosa = 0;          ///< screened by a certificate; cuda, decoding: scored in full, and only what reaches tau kept
  std::int64_t full = 0;          ///< scored in full because the method says so
  std::int64_t full_context = 0;  ///< scored in full: fewer visible keys than min_context
  std::int64_t full_loose = 0;    ///< scored in full: the certificate was predicted, or turned out, to reject too little; cuda,
                                  ///< decoding: hints gave no tau, or one that too few or too many scores reach
  std::int64_t full_exempt = 0;   ///< scored in full: non-finite or out-of-range query data has no certificate
};

struct Stats {
  std::int64_t rows = 0;
  std::int64_t clamped_rows = 0;  ///< rows whose ks or ke lay outside [0, nk]
  PathCounts path;

  // Query-key pairs.
  std::int64_t visible = 0;    ///< what dense scores
  std::int64_t seeds = 0;      ///< scored in full to find tau before any bound was compared
  std::int64_t screened = 0;   ///< compared by bound
  std::int64_t survivors = 0;  ///< bound not below the tau of the time
  std::int64_t refined = 0;    ///< survivors scored in full; fewer than survivors where tau rose meanwhile. cuda: more, because
                               ///< neighbouring rows score each other's survivors
  std::int64_t full = 0;       ///< scored in full without screening
  std::int64_t exempt = 0;     ///< keys that always survive: odd scale or NaN byte (counted once per key)

  std::int64_t bound_rows = 0;   ///< sum over screened rows of the row budget
  std::int64_t compactions = 0;  ///< times a full record buffer was compacted exactly
  double predicted_work = 0;     ///< cost model, relative to dense, summed over the rows that a plan was made for
  double planned_rows = 0;       ///< rows in predicted_work

  // Thread-seconds by stage.
  double seconds_seed = 0, seconds_certify = 0, seconds_screen = 0, seconds_refine = 0, seconds_select = 0;
  double seconds_score = 0;  ///< full scoring (dense, fused, fallbacks)
};

/// Sums of two runs, for callers who select in chunks.
Stats& operator+=(Stats& sum, const Stats& other) noexcept;

/// The path one row took.
enum class Path : std::uint8_t { empty, short_row, dosa, full, full_context, full_loose, full_exempt };

/// What happened to one row; Indexer::run fills one per row on request.
struct RowReport {
  Path path = Path::empty;
  Form form = Form::automatic;  ///< of the certificate, if there was one
  ScreenPrecision precision = ScreenPrecision::automatic;
  std::int32_t retained = 0;    ///< heads evaluated exactly in the bound
  std::int32_t bound_rows = 0;  ///< retained heads and auxiliary rows
  std::int64_t visible = 0;
  std::int64_t seeds = 0;
  std::int64_t survivors = 0;
  std::int64_t refined = 0;
  float seed_tau = 0;          ///< tau when screening began; -inf if there were no witnesses
  float tau = 0;               ///< the K-th best score, -inf for short rows
  float predicted_work = 0;    ///< relative to dense; 0 if nothing was planned
};

}  // namespace dosa
