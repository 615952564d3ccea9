// The device stages before the screen, in order: key summaries, witnesses, tau. Same rules as stages.hpp.
#pragma once

#include "backend/cuda/stages.hpp"
#include "dosa/options.hpp"

namespace dosa::cuda {

/// keys: what the screen knows of each key. A key is exempt if it has a NaN byte or its scale is not within [2^-40,
/// 2^20].
struct KeysArgs {
  const std::uint8_t* k;  // e4m3 [nk][128], dense, 16-byte aligned
  const float* k_scale;   // [nk]
  std::int64_t nk;
  float* rho;                   // [period][slice_stride] rho sqrt(128) >= max(||k||, 2^-6), rounded up; +inf for exempt keys
  float* inv_alpha;             // [period][slice_stride] 1 / k_scale, to nearest; 0 for exempt keys
  std::uint32_t* exempt;        // [period][mask_words(slice_stride)]: of every slice, as a row of the screen's mask
  std::uint64_t* exempt_count;  // null, or raised by the number of exempt keys
  int period = 1;               // slices of keys: slice_of(nk, phase, period)
  std::int64_t slice_stride = 0;  // a multiple of kMaskRun, at least the keys of slice 0, where period > 1
};
cudaError_t launch_keys(const KeysArgs& args, cudaStream_t stream);

/// gather: the keys of a slice, side by side.
struct GatherArgs {
  const std::uint8_t* k;  // e4m3 [nk][128], dense, 16-byte aligned
  const float* k_scale;   // [nk]
  KeySlice keys;
  std::uint8_t* to_k;     // [keys.count][128]
  float* to_scale;        // [keys.count]
};
cudaError_t launch_gather(const GatherArgs& args, cudaStream_t stream);

/// Most winners of a list that are looked at.
inline constexpr int kMaxWinners = 8192;

/// winners: suggested winners (any order, repeats and impossible ids allowed) to ascending, distinct ids within [0,
/// nk). They come as kept records or as ids.
struct WinnersArgs {
  std::int64_t lists;
  const Record* kept;       // [lists][stride], or null
  const std::int32_t* ids;  // [lists][stride] if kept is null
  std::int64_t stride;
  const std::int32_t* count;  // [lists], or null: every list has `length`
  int length;                 // most entries of a list; beyond kMaxWinners they are ignored
  std::int64_t nk;
  std::int32_t* sorted;        // [lists][sorted_stride]
  std::int64_t sorted_stride;  // >= min(length, kMaxWinners)
  std::int32_t* sorted_count;  // [lists]
};
cudaError_t launch_winners(const WinnersArgs& args, cudaStream_t stream);

/// seed: witnesses of every group of rows, ascending, distinct, within what its rows see together (seed/seed.hpp): the winners
/// of its list, the nearest keys and, while these are fewer than 3/2 topk, evenly spread ones.
struct SeedArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  int group;                          // rows that share witnesses
  int topk;
  const std::int32_t* winners;        // as launch_winners leaves them, or null
  std::int64_t winners_stride;
  const std::int32_t* winners_count;  // [lists]
  std::int64_t rows_per_list;         // row r of the slice takes list r / rows_per_list; a multiple of `group`
  std::int32_t* ids;                  // of group g at [g * ids_stride, ...)
  std::int64_t ids_stride;            // >= max_witnesses(topk, entries of a list) of seed/seed.hpp
  std::int64_t* offset;               // [groups] g * ids_stride
  std::int32_t* count;                // [groups]
  const std::uint8_t* budget = nullptr;  // [rows], or null; rows of budget 0 want no witnesses,
  std::int64_t min_context = 0;          // nor do rows that see fewer keys
};
cudaError_t launch_seed(const SeedArgs& args, cudaStream_t stream);

/// tau: the score of the topk-th kept record; -inf where fewer are kept or it is NaN.
struct TauArgs {
  std::int64_t rows;
  int topk;
  const Record* kept;              // [rows][topk]
  const std::int32_t* kept_count;  // [rows]
  float* tau;                      // of row r at [step * r + first]
  Rows pass = {};                  // no list
  bool raise = false;              // true: tau only rises, and `lowered`, if not null, becomes the screen's tau for it
  float* lowered = nullptr;
};
cudaError_t launch_tau(const TauArgs& args, cudaStream_t stream);

/// Row budgets that the screen has: 8, 12, 16, 20, 24, 32. The last two bound rows are the auxiliary pair.
inline constexpr int kBudgetCount = 6;
constexpr int budget_at(int i) { return i + 1 < kBudgetCount ? 8 + 4 * i : 32; }

/// Queries that share sampled keys, which all of them see: rows [i * kPanelRows, (i + 1) * kPanelRows) of a slice.
inline constexpr int kPanelRows = 16;

/// Rows of more heads get no certificate.
inline constexpr int kMaxCertifiedHeads = 64;

/// What plan and certify read.
struct CertifyInputs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  const float* rho;        // as launch_keys leaves them
  const float* inv_alpha;
  const float* tau;        // [rows]; rows of -inf get no certificate
  bool base;               // the base form (with a linear aggregate) instead of the extended one
  float allowances;        // 1; tests that must fail without the allowances set it to 0
  Ablation ablation = Ablation::none;
  int period = 1;          // as launch_keys was given
  std::int64_t slice_stride = 0;
};

/// plan, first half: how many sampled keys would survive at every budget, for every `stride`-th row.
struct PredictArgs {
  CertifyInputs inputs;
  std::int64_t first;       // rows first, first + stride, ... are asked; below stride
  std::int64_t stride;      // a multiple of kPanelRows
  std::int32_t* survivors;  // [ceil(rows / stride)][kBudgetCount]; -1: no certificate
  std::int32_t* sampled;    // [ceil(rows / stride)] keys
};
cudaError_t launch_predict(const PredictArgs& args, cudaStream_t stream);

/// plan, second half: the cheapest budget of every group of rows by predicted work, rows * row + survivors * survivor +
/// fixed, in units of one dense query-key pair. A group whose best costs more than `too_loose` is not screened.
struct ChooseArgs {
  std::int64_t rows;
  std::int64_t group_rows;  // a multiple of the stride
  std::int64_t stride;
  const std::int32_t* survivors;  // as launch_predict leaves them
  const std::int32_t* sampled;
  double row_price;
  double survivor_price;
  double fixed_price;
  double too_loose;
  std::uint8_t* budget;  // [rows] 0: not screened
};
cudaError_t launch_choose(const ChooseArgs& args, cudaStream_t stream);

/// certify: certificates of all rows, packed as launch_screen reads them.
struct CertifyArgs {
  CertifyInputs inputs;
  const std::uint8_t* budget;  // [rows] budget_at(...), or 0: not screened,
  std::int64_t min_context;    // nor are rows that see fewer keys
  std::uint8_t* bound_rows;    // e4m3 [rows][budget][128], row stride bound_stride
  std::int64_t bound_stride;   // bytes, a multiple of 16
  std::uint16_t* weight;       // bf16 [rows][budget - 2], row stride weight_stride
  std::int64_t weight_stride;
  float* c;                // [rows]
  float* sigma;            // [rows][2]
  float* tau;              // [rows]
  std::uint8_t* screened;  // [rows] the row's budget, or 0: it has no certificate and must be scored in full
};
cudaError_t launch_certify(const CertifyArgs& args, cudaStream_t stream);

/// lists: the rows of each budget, ascending, and those that are not screened.
struct ListsArgs {
  std::int64_t rows;
  const std::uint8_t* screened;  // [rows] as launch_certify leaves them
  std::int32_t* list;            // [kBudgetCount + 1][rows]; the last list: not screened
  std::int32_t* size;            // [kBudgetCount + 1]
};
cudaError_t launch_lists(const ListsArgs& args, cudaStream_t stream);

}  // namespace dosa::cuda
