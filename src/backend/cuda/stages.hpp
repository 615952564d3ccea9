// The device stages of the cuda backend, in the order in which data meets them: plain argument structs, one launcher each.
//
// Launchers enqueue on `stream` and return the launch error; they neither allocate nor synchronise, and take every size from
// their arguments, so they are safe under CUDA graph capture. Row lengths (ks, ke) are read on the device. All pointers are
// device pointers. Rows are queries of one slice: row r of a slice is query first_row + r of the problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dosa/options.hpp"

namespace dosa::cuda {

inline constexpr int kDim = 128;
inline constexpr int kMaxHeads = 128;

/// Keys in pages (Problem::kv_cache and block_table). A page is page_size rows of 128 bytes, then page_size scales.
struct Pages {
  int page_shift = 0;                  // page_size = 1 << page_shift; 0: keys are contiguous
  const std::uint8_t* pool = nullptr;
  std::int64_t stride = 0;             // bytes from page to page, a multiple of 4
  std::int64_t count = 0;              // pages of the pool; keys of any other are read as zero
  const std::int32_t* table = nullptr;  // page of block b of request r at [r * table_stride + b * block_stride]
  std::int64_t table_stride = 0;
  std::int64_t block_stride = 0;
  std::int64_t requests = 0;           // rows of the table
  const std::int32_t* owner = nullptr;  // [nq] request of every query, or null:
  std::int64_t queries = 0;            // so many neighbours belong to one request
};

/// The caller's tensors.
struct Inputs {
  const std::uint8_t* q;   // e4m3 [nq][heads][128], dense
  const std::uint8_t* k;   // e4m3 [nk][128], dense; null where keys are in pages
  const float* k_scale;    // [nk]
  const float* w;          // [nq][heads], row stride w_stride
  const std::int32_t* ks;  // [nq] or null (0)
  const std::int32_t* ke;  // [nq] or null (nk)
  std::int64_t w_stride;
  std::int64_t nq;
  std::int64_t nk;         // of one request, where keys are in pages
  int heads;
  Pages pages = {};
};

/// Which rows of a slice a pass takes: every `step`-th from `first` on, or those of a list that is made on the device. Results
/// that are kept for later lie at a row's place: its number in the slice if listed, else its number divided by the step.
struct Rows {
  std::int64_t first = 0;
  std::int64_t step = 1;
  const std::int32_t* list = nullptr;       // rows of the slice, or null
  const std::int32_t* list_size = nullptr;  // [1]; the pass takes list[first], list[first + 1], ... as far as there are
};

/// Keys of a slice: phase, phase + period, ... A period above 1 makes a slice an even sample of all keys.
struct KeySlice {
  int phase = 0;
  int period = 1;
  int count = 0;
};

constexpr KeySlice slice_of(std::int64_t nk, int phase, int period) {
  return {phase, period, nk > phase ? static_cast<int>((nk - phase + period - 1) / period) : 0};
}
constexpr KeySlice every_key(std::int64_t nk) { return slice_of(nk, 0, 1); }

/// The number of key `i` of a slice.
constexpr std::int64_t key_at(const KeySlice& slice, std::int64_t i) { return i * slice.period + slice.phase; }

/// How many keys of the slice come before `key`.
constexpr int keys_before(const KeySlice& slice, std::int64_t key) {
  const std::int64_t before = key <= slice.phase ? 0 : (key - slice.phase + slice.period - 1) / slice.period;
  return before < slice.count ? static_cast<int>(before) : slice.count;
}

/// What a run counts on the device; the first bytes of its workspace.
struct Counters {
  std::uint64_t clamped_rows;  // ks or ke outside [0, nk]
  std::uint64_t empty;
  std::uint64_t short_rows;    // at most topk visible keys
  std::uint64_t dosa;          // screened to the end
  std::uint64_t full;          // scored in full as the method says, or for one of three reasons:
  std::uint64_t full_context;  // fewer visible keys than min_context
  std::uint64_t full_loose;    // a certificate predicted too loose, more survivors than there was room for, or a wrong guess of tau
  std::uint64_t full_exempt;   // no certificate, or no tau
  std::uint64_t bound_rows;    // sum of the row budgets of screened rows
  std::uint64_t exempt;        // keys
  // Query-key pairs:
  std::uint64_t visible;
  std::uint64_t seeds;
  std::uint64_t screened;
  std::uint64_t survivors;
  std::uint64_t refined;
  std::uint64_t scored_in_full;
};

/// Records are the host's (select/records.hpp): order_code(score) << 32 | id << 1 | negative zero; ascending is best first.
using Record = std::uint64_t;

/// Records of rows, and how many there were.
struct RecordLists {
  Record* records = nullptr;  // [rows][stride]
  std::int64_t stride = 0;
  std::int32_t* count = nullptr;  // [rows], raised; what exceeds `stride` was not recorded
  std::uint8_t* lost = nullptr;   // [rows] raised to 1 where there were more records than `stride`
};

/// score: reference scores (sm90 arithmetic, bit for bit reference_score(ReferenceScorer::sm90, ...)) of the keys number
/// [key_begin, key_end) of a slice for the rows of a pass. They are stored; or those of visible keys that are not below tau become
/// records, and no others are kept.
struct ScoreArgs {
  Inputs in;               // k and k_scale hold the keys of the slice alone
  std::int64_t first_row;
  std::int64_t rows;       // of the pass, at most
  KeySlice keys;
  std::int64_t key_begin;  // a multiple of 64
  std::int64_t key_end;
  float* scores;           // [rows][score_stride]: score of key i at i - key_begin; cells outside the visible range: unspecified
  std::int64_t score_stride;
  Rows pass = {};
  // Where scores is null:
  const float* tau = nullptr;  // [rows of the slice]; -inf: every score becomes a record
  RecordLists found = {};      // at rows of the slice; ids are key numbers
};
cudaError_t launch_score(const ScoreArgs& args, int multiprocessors, cudaStream_t stream);

/// Likely winners, any ids: i-th of a query of a request at [query * query_stride + request * request_stride + i * stride].
struct Hints {
  const std::int32_t* ids = nullptr;
  std::int64_t query_stride = 0;
  std::int64_t request_stride = 0;
  std::int64_t stride = 1;
  int width = 0;
};

/// witness: reference scores of hinted keys in pages, of which tau is the K-th best that the row sees. It proves nothing (ids may
/// come twice): see launch_check_tau. Without K of them, tau is -inf if all that the row sees can be recorded, else +inf.
struct WitnessArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  int topk;
  Hints hints;
  RecordLists found;         // count and lost become 0
  std::uint32_t* codes;      // [rows][code_stride] scratch
  std::int64_t code_stride;  // at least the width of the hints
  std::int32_t* done;        // [rows] scratch, zero before and after
  float* tau;                // [rows]
};
cudaError_t launch_witness(const WitnessArgs& args, cudaStream_t stream);

/// The end of a row's selection. Its K first records, sorted by score (or by id), go to its output row: ids absolute, relative to
/// max(ks, 0) or slots of the page pool, -1 and -inf padding, NaN as 0x7FC00000; a row with nothing visible is all -1. The winners of
/// a request's last query that sees a key come in front of what `recent` held (decode/recent.hpp); more than kMaxRecent ids are not
/// kept. What became of the row is counted.
inline constexpr int kMaxRecent = 8192;
struct OutputArgs {
  Inputs in = {};                   // as the caller gave them
  std::int64_t first_row = 0;
  int topk = 0;
  bool ascending = false;
  IndexSpace space = IndexSpace::absolute;
  bool gathered = false;            // ids of records count through the keys of all requests: see launch_gather_pages
  std::int32_t* ids = nullptr;      // [nq][topk], row stride ids_stride; null: no output yet, what is kept stays records
  std::int64_t ids_stride = 0;
  float* scores = nullptr;          // null or [nq][topk], row stride scores_stride
  std::int64_t scores_stride = 0;
  std::int32_t* recent = nullptr;   // null or [requests][recent_width], row stride recent_stride
  std::int64_t recent_stride = 0;
  std::int64_t recent_width = 0;

  Counters* counters = nullptr;    // null: nothing is counted
  std::int64_t min_context = 0;
  const std::uint8_t* budget = nullptr;      // [rows] as launch_choose leaves them, or null: the method scores in full
  const std::uint8_t* screened = nullptr;    // [rows] as launch_certify leaves them
  const std::uint8_t* lost = nullptr;        // [rows] 1: scored in full after all; or null
  const std::int32_t* seed_count = nullptr;  // [groups of group_rows(heads) rows] witnesses, or null:
  KeySlice sample = {};                      // tau came from these keys,
  int hinted = -1;                           // or from so many hinted ones of each row
};

/// select over stored scores: per row of a pass, the min(K, visible) first of [key_begin, key_end) and of the records kept so
/// far, in the total order (score descending, id ascending; NaN last; zeros equal), exactly, whatever the distribution. They are kept,
/// or they are the output.
struct SelectScoresArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  KeySlice keys;           // ids are key numbers of it
  std::int64_t key_begin;
  std::int64_t key_end;
  const float* scores;     // as launch_score writes them
  std::int64_t score_stride;
  int topk;
  bool first_slice;        // true: nothing has been kept of these rows yet
  Record* kept;            // [place][topk] in and out, unsorted; null where there is output of one slice
  std::int32_t* kept_count;  // [place]
  Rows pass = {};
  OutputArgs output = {};
};
cudaError_t launch_select_scores(const SelectScoresArgs& args, int multiprocessors, cudaStream_t stream);

/// Survivors of one row among the keys of a slice: one bit a key, set = survives. Keys come in runs of 1024, 32 words a run,
/// laid out as tensor-core accumulators hold them. Bits of keys outside the row's visible range are 0; words of runs in which
/// the row sees nothing are unspecified.
inline constexpr int kMaskRun = 1024;
inline constexpr int kMaskRunWords = kMaskRun / 32;

/// Words of a row for `keys` keys.
constexpr std::int64_t mask_words(std::int64_t keys) { return (keys + kMaskRun - 1) / kMaskRun * kMaskRunWords; }

struct MaskBit {
  std::int64_t word;
  int bit;
};

/// Where key i of the slice is.
constexpr MaskBit mask_bit(std::int64_t i) {
  const int in_run = static_cast<int>(i % kMaskRun);
  return {i / kMaskRun * kMaskRunWords + in_run % 64 / 16 * 8 + in_run % 8, 31 - (in_run / 64 * 2 + in_run / 8 % 2)};
}

/// Inverse: i of a bit of a word.
constexpr std::int64_t mask_key(std::int64_t word, int bit) {
  const int in_run = static_cast<int>(word % kMaskRunWords);
  const int step = 31 - bit;
  return word / kMaskRunWords * kMaskRun + step / 2 * 64 + in_run / 8 * 16 + step % 2 * 8 + in_run % 8;
}

/// screen: the bound of every key of a slice against tau, for the listed rows, all of one row budget
/// R = 8, 12, 16, 20, 24 or 32. With r = R - 2 retained heads and x = the dot of a bound row and a key as the tensor core
/// rounds it, a key is rejected if
///
///   rho_i c - tau_i' inv_alpha_i  -  ( sigma_high x_high + sigma_low x_low )  +  sum_{j < r} weight_j bf16( [x_j]+ )   <   0
///
/// (the first line in f32, each operation rounded to nearest; the sum on the tensor cores, products exact, f32 accumulation).
/// The aggregate is linear: its sign is in the sigmas.
struct ScreenArgs {
  const std::uint8_t* k;            // e4m3 [nk][128], dense, 16-byte aligned
  const float* rho;                 // [keys of the slice]; +inf for exempt keys
  const float* inv_alpha;           // [keys of the slice] 1 / alpha; 0 for exempt keys
  const std::uint32_t* exempt;      // as a row of the mask, bits of exempt keys; or null
  const std::int32_t* ks;           // [nq] or null (0)
  const std::int32_t* ke;           // [nq] or null (nk)
  std::int64_t first_row;           // row r of the slice is query first_row + r
  KeySlice keys;
  int budget;                       // R
  const std::int32_t* list;         // [*list_size] rows of the slice with this budget, ascending
  const std::int32_t* list_size;    // [1]
  std::int64_t list_capacity;       // *list_size is at most this
  const std::uint8_t* bound_rows;   // e4m3 [rows][R][128], row stride bound_stride: r retained heads, then high, then low
  std::int64_t bound_stride;        // bytes from row to row, a multiple of 16
  const std::uint16_t* weight;      // bf16 [rows][r], row stride weight_stride
  std::int64_t weight_stride;
  const float* c;                   // [rows] multiplies rho, > 0
  const float* sigma;               // [rows][2] high, low
  const float* tau;                 // [rows] tau', lowered for the screen's own roundings; finite
  std::uint32_t* mask;              // [rows][mask_stride]; only listed rows are written
  std::int64_t mask_stride;         // words, at least mask_words(keys.count)
};
cudaError_t launch_screen(const ScreenArgs& args, int multiprocessors, cudaStream_t stream);

/// Rows whose survivors are gathered together: as many as fill a tile of 128 query heads. What neighbours attend to overlaps,
/// so that a gathered key serves about two of four rows that asked for it.
constexpr int group_rows(int heads) { return heads <= 8 ? 16 : heads <= 16 ? 8 : heads <= 32 ? 4 : heads <= 64 ? 2 : 1; }

/// compact: masks to id lists, one for every group of rows: the keys that survive in any of them. Lists lie one after the other
/// in row order, their ids in the order of the mask's bits; a group whose list would end beyond `capacity` has none and its
/// rows are lost: they must be scored in full.
struct CompactArgs {
  const std::int32_t* ks;           // [nq] or null (0)
  const std::int32_t* ke;           // [nq] or null (nk)
  std::int64_t first_row;
  std::int64_t rows;
  KeySlice keys;
  const std::uint32_t* mask;        // [rows][mask_stride], 16-byte aligned
  std::int64_t mask_stride;         // a multiple of 4
  const std::uint8_t* screened;     // [rows] 0: the row has no mask; or null (all have)
  int group;                        // rows of a list, 1..16
  std::int64_t capacity;            // of ids
  std::int32_t* ids;                // [capacity]
  std::int64_t* offset;             // [groups]
  std::int32_t* count;              // [groups]
  std::uint8_t* lost;               // [rows] raised to 1 where the list did not fit; its count is 0
  std::uint64_t* survivors;         // null, or raised by the number of bits,
  std::uint64_t* listed;            // and this by that of row-key pairs that lists stand for
};
cudaError_t launch_compact(const CompactArgs& args, cudaStream_t stream);

/// refine: reference scores of listed keys for all rows of a group, same bits as launch_score; scores of visible keys that are
/// not below tau become records.
struct RefineArgs {
  Inputs in;
  std::int64_t first_row;
  std::int64_t rows;
  const std::int32_t* ids;       // of group g of group_rows(heads) rows at [offset[g], offset[g] + count[g]), distinct
  const std::int64_t* offset;    // [groups]
  const std::int32_t* count;     // [groups]
  const std::uint8_t* screened;  // [rows] 0: no records are wanted; or null (of all)
  const float* tau;              // [rows]; NaN or -inf: keep everything
  RecordLists found;
};
cudaError_t launch_refine(const RefineArgs& args, int multiprocessors, cudaStream_t stream);

/// Rows of which more must be known: those of `lost`, those that `screened` says have no records, and those whose K-th record (-inf if
/// there are fewer) lies below tau. They are listed instead of written.
struct Redo {
  const std::uint8_t* screened = nullptr;  // [rows] 0: scored in full in any case; or null
  const float* tau = nullptr;              // [rows]; null: nothing is checked
  std::uint8_t* lost = nullptr;            // [rows] raised to 1 for listed rows
  std::int32_t* list = nullptr;            // [rows]
  std::int32_t* list_size = nullptr;       // [1] 0 at first
};

/// select over records: per row, the K first of its records and of those kept so far. No record may come twice.
struct SelectRecordsArgs {
  std::int64_t rows;
  const Record* records;             // [rows][record_stride]
  std::int64_t record_stride;
  const std::int32_t* record_count;  // [rows]; what exceeds record_stride was not recorded
  int topk;
  Record* kept;                      // [rows][topk] in and out, unsorted; null where there is output
  std::int32_t* kept_count;          // [rows]
  bool first_slice = true;           // true: nothing has been kept of these rows yet, as is the case where there is output
  OutputArgs output = {};
  Redo redo = {};
};
cudaError_t launch_select_records(const SelectRecordsArgs& args, int multiprocessors, cudaStream_t stream);

/// gather_pages: keys in pages to contiguous ones, request after request with room for nk each, and the ranges of rows in them. What
/// no row of a request sees is zero, with scale 1.
struct GatherPagesArgs {
  Inputs in;              // keys in pages
  std::uint8_t* k;        // [requests * nk][128]
  float* k_scale;         // [requests * nk]
  std::int32_t* ks;       // [nq]
  std::int32_t* ke;       // [nq]
  std::int32_t* seen_to;  // [requests] one past the last key that a row of the request sees
};
cudaError_t launch_gather_pages(const GatherPagesArgs& args, cudaStream_t stream);

}  // namespace dosa::cuda
