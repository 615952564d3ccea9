// The device stages before the screen, in order: key summaries, witnesses, tau. Same rules as stages.hpp.
#pragma once

#include "backend/cuda/stages.hpp"

namespace dosa::cuda {

/// keys: what the screen knows of each key. A key is exempt if it has a NaN byte or its scale is not within [2^-40,
/// 2^20].
struct KeysArgs {
  const std::uint8_t* k;  // e4m3 [nk][128], dense, 16-byte aligned
  const float* k_scale;   // [nk]
  std::int64_t nk;
  float* rho;                   // [nk] rho sqrt(128) >= max(||k||, 2^-6), rounded up; +inf for exempt keys
  float* inv_alpha;             // [nk] 1 / k_scale, to nearest; 0 for exempt keys
  std::uint32_t* exempt;        // [mask_words(nk)] as the screen's mask, keys from 0
  std::uint64_t* exempt_count;  // null, or raised by the number of exempt keys
};
cudaError_t launch_keys(const KeysArgs& args, cudaStream_t stream);

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

/// seed: witnesses of every row, ascending, distinct, visible (seed/seed.hpp): the winners of its list, the topk
/// nearest keys and, while these are fewer than 3/2 topk, evenly spread ones.
struct SeedArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  int topk;
  const std::int32_t* winners;  // as launch_winners leaves them, or null
  std::int64_t winners_stride;
  const std::int32_t* winners_count;  // [lists]
  std::int64_t rows_per_list;         // row r of the slice takes list r / rows_per_list
  std::int32_t* ids;                  // row r at [r * ids_stride, ...)
  std::int64_t ids_stride;            // >= max_witnesses(topk, entries of a list) of seed/seed.hpp
  std::int64_t* offset;               // [rows] r * ids_stride
  std::int32_t* count;                // [rows]
};
cudaError_t launch_seed(const SeedArgs& args, cudaStream_t stream);

/// tau: the score of the topk-th kept record; -inf where fewer are kept or it is NaN.
struct TauArgs {
  std::int64_t rows;
  int topk;
  const Record* kept;              // [rows][topk]
  const std::int32_t* kept_count;  // [rows]
  float* tau;                      // [rows]
};
cudaError_t launch_tau(const TauArgs& args, cudaStream_t stream);

}  // namespace dosa::cuda
