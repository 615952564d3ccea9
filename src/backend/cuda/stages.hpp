// The device stages of the cuda backend, in the order in which data meets them: plain argument structs, one launcher each.
//
// Launchers enqueue on `stream` and return the launch error; they neither allocate nor synchronise, and take every size from
// their arguments, so they are safe under CUDA graph capture. Row lengths (ks, ke) are read on the device. All pointers are
// device pointers. Rows are queries of one slice: row r of a slice is query first_row + r of the problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dosa::cuda {

inline constexpr int kDim = 128;
inline constexpr int kMaxHeads = 128;

/// The caller's tensors.
struct Inputs {
  const std::uint8_t* q;   // e4m3 [nq][heads][128], dense
  const std::uint8_t* k;   // e4m3 [nk][128], dense
  const float* k_scale;    // [nk]
  const float* w;          // [nq][heads], row stride w_stride
  const std::int32_t* ks;  // [nq] or null (0)
  const std::int32_t* ke;  // [nq] or null (nk)
  std::int64_t w_stride;
  std::int64_t nq;
  std::int64_t nk;
  int heads;
};

/// score: reference scores (sm90 arithmetic, bit for bit reference_score(ReferenceScorer::sm90, ...)) of the keys
/// [key_begin, key_end) for rows [first_row, first_row + rows).
struct ScoreArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t key_begin;  // a multiple of 64
  std::int64_t key_end;
  float* scores;           // [rows][score_stride]: score of key i at i - key_begin; cells outside the visible range: unspecified
  std::int64_t score_stride;
};
cudaError_t launch_score(const ScoreArgs& args, int multiprocessors, cudaStream_t stream);

/// Records are the host's (select/records.hpp): order_code(score) << 32 | id << 1 | negative zero; ascending is best first.
using Record = std::uint64_t;

/// select over stored scores: per row, the min(K, visible) first of [key_begin, key_end) and of the records kept so far, in
/// the total order (score descending, id ascending; NaN last; zeros equal), exactly, whatever the distribution.
struct SelectScoresArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t key_begin;
  std::int64_t key_end;
  const float* scores;     // as launch_score writes them
  std::int64_t score_stride;
  int topk;
  bool first_slice;        // true: nothing has been kept of these rows yet
  Record* kept;            // [rows][topk] in and out, unsorted
  std::int32_t* kept_count;  // [rows]
};
cudaError_t launch_select_scores(const SelectScoresArgs& args, cudaStream_t stream);

/// refine: reference scores of listed keys, same bits as launch_score; scores not below tau become records.
struct RefineArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  const std::int32_t* ids;          // survivors of all rows, row r at [offset[r], offset[r] + count[r])
  const std::int64_t* offset;       // [rows]
  const std::int32_t* count;        // [rows]
  const float* tau;                 // [rows]; -inf: keep everything
  Record* records;                  // row r at [record_offset[r], ...), room for count[r]
  const std::int64_t* record_offset;  // [rows]
  std::int32_t* record_count;       // [rows], set by the kernel
};
cudaError_t launch_refine(const RefineArgs& args, int multiprocessors, cudaStream_t stream);

/// select over records: per row, the K first of its records.
struct SelectRecordsArgs {
  std::int64_t rows;
  const Record* records;
  const std::int64_t* record_offset;  // [rows]
  const std::int32_t* record_count;   // [rows]
  int topk;
  Record* kept;                       // [rows][topk], unsorted
  std::int32_t* kept_count;           // [rows]
};
cudaError_t launch_select_records(const SelectRecordsArgs& args, cudaStream_t stream);

/// write: kept records to output rows: sorted by score (or by id), ids absolute or relative to max(ks, 0), -1 and -inf
/// padding, NaN as 0x7FC00000. A row with nothing visible is all -1.
struct WriteArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  int topk;
  bool ascending;
  bool relative;
  const Record* kept;               // [rows][topk]
  const std::int32_t* kept_count;   // [rows]
  std::int32_t* ids;                // [nq][topk], row stride ids_stride
  std::int64_t ids_stride;
  float* scores;                    // null or [nq][topk], row stride scores_stride
  std::int64_t scores_stride;
};
cudaError_t launch_write(const WriteArgs& args, cudaStream_t stream);

}  // namespace dosa::cuda
