// A bounded buffer of records of one row, owned by one CTA, compacted exactly when it is full.
//
// The host's RecordBuffer (select/records.hpp) with a cut instead of tau: a record is turned away only if K records of
// the row are known to come before it. So ties never fill the buffer twice, and nothing that could win is ever dropped.
#pragma once

#include <cstdint>

#include "backend/cuda/order.cuh"

namespace dosa::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFU;

template <int kThreads>
class RecordBuffer {
 public:
  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32 && kBins % kThreads == 0);

  struct Shared {
    std::uint32_t bins[kBins];  // all zero between uses
    std::uint32_t warp_low[32];
    std::uint32_t warp_high[32];
    std::uint32_t warp_sum[32];
    std::uint32_t bin;
    std::uint32_t before;
    std::uint32_t inside;
    std::uint32_t count;  // records offered since the last compaction: more than the capacity means some found no room
    std::uint32_t written;
  };

  /// All threads. `storage`, in shared memory, holds `capacity` > k records.
  __device__ RecordBuffer(Shared& shared, Record* storage, int capacity, int k)
      : shared_(shared), storage_(storage), capacity_(capacity), k_(k) {
    for (int i = thread(); i < kBins; i += kThreads) shared_.bins[i] = 0;
    clear(kEveryRecord);
  }

  /// All threads: forgets the records; from now on only those below `cut` are taken.
  __device__ void clear(Record cut) {
    __syncthreads();
    if (thread() == 0) shared_.count = 0;
    cut_ = cut;
    __syncthreads();
  }

  /// All threads: `count` records, at most the capacity, have been put into the storage.
  __device__ void resize(int count) {
    __syncthreads();
    if (thread() == 0) shared_.count = count;
    __syncthreads();
  }

  /// The next record must be below it.
  [[nodiscard]] __device__ Record cut() const { return cut_; }
  /// All threads, after a barrier.
  [[nodiscard]] __device__ int size() const { return min(static_cast<int>(shared_.count), capacity_); }
  [[nodiscard]] __device__ Record operator[](int i) const { return storage_[i]; }
  [[nodiscard]] __device__ Record* storage() const { return storage_; }

  /// More records were pushed than there is room for: all threads must meet and compact() before the next is pushed.
  [[nodiscard]] __device__ bool full() const {
    const std::uint32_t count = *static_cast<const volatile std::uint32_t*>(&shared_.count);
    return __any_sync(kFullWarp, count > static_cast<std::uint32_t>(capacity_));
  }

  /// A whole warp: places for `count` records of each lane, one after the other.
  __device__ std::uint32_t reserve(int count) {
    std::uint32_t up_to = count;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(kFullWarp, up_to, step);
      if (lane() >= step) up_to += other;
    }
    std::uint32_t base = 0;
    if (lane() == 31) base = atomicAdd(&shared_.count, up_to);
    return __shfl_sync(kFullWarp, base, 31) + up_to - count;
  }

  /// False where there is no room; after compact() the record has to be tested against the new cut and pushed again.
  __device__ bool put(std::uint32_t place, Record record) {
    if (place >= static_cast<std::uint32_t>(capacity_)) return false;
    storage_[place] = record;
    return true;
  }

  /// The same, one record at a time.
  __device__ bool push(Record record) { return put(atomicAdd(&shared_.count, 1U), record); }

  /// All threads: one record each where `has`; ends with a barrier.
  __device__ void offer(bool has, Record record) {
    bool waiting = has;
    while (true) {
      waiting = waiting && record < cut_ && !push(record);
      if (__syncthreads_or(waiting) == 0) return;
      compact();
    }
  }

  /// All threads, between barriers: of a full buffer the K first records stay, and the cut comes down to them.
  __device__ void compact() { cut_ = min(cut_, keep_first(shared_, storage_, capacity_, k_)); }

  /// All threads: the K first records (or all, if fewer) to `out`; returns how many. The buffer is left as it is.
  __device__ int write_first(Record* out) {
    const int n = size();
    const Record bound = n <= k_ ? kEveryRecord : bound_of(shared_, n, k_, 0, ReadRecord{storage_});
    return move_below(shared_, bound, storage_, n, out, k_);
  }

  /// All threads: a key with at least k of the n keys below it, exactly k if `coarsest` is 0 and the keys are distinct;
  /// otherwise it may lie up to 2^coarsest too high. Each pass spreads what is left over the bins, so that leading bits
  /// which all keys share cost no pass, whatever the distribution. Ends with a barrier.
  template <class KeyAt>
  static __device__ Record bound_of(Shared& shared, int n, int k, int coarsest, KeyAt key_at) {
    Record low = 0;
    int shift = span_of(shared, n, key_at, low);
    std::uint32_t wanted = k;
    while (true) {
#pragma unroll 2
      for (int i = thread(); i < n; i += kThreads) {
        const Record key = key_at(i);
        const Record bin = (key - low) >> shift;
        if (key >= low && bin < kBins) atomicAdd(&shared.bins[bin], 1U);
      }
      __syncthreads();
      find_bin(shared, wanted);
      low += Record{shared.bin} << shift;
      wanted -= shared.before;
      if (shared.inside == wanted || shift <= coarsest) {
        const Record bound = low + (Record{1} << shift);
        return bound < low ? kEveryRecord : bound;
      }
      shift = max(shift - kBinBits, 0);
    }
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int lane() { return thread() & 31; }
  static __device__ int warp() { return thread() >> 5; }
  static __device__ unsigned lanes_below() {
    unsigned mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
  }

  struct ReadRecord {
    const Record* records;
    __device__ Record operator()(int i) const { return records[i]; }
  };

  // Rare, so kept out of the registers of what calls it. Returns the new cut.
  static __device__ __noinline__ Record keep_first(Shared& shared, Record* records, int n, int k) {
    const Record bound = bound_of(shared, n, k, 0, ReadRecord{records});
    const int kept = move_below(shared, bound, records, n, records, k);
    if (thread() == 0) shared.count = kept;
    __syncthreads();
    return bound;
  }

  // The least code as a key, and the shift that spreads all keys over the bins.
  template <class KeyAt>
  static __device__ int span_of(Shared& shared, int n, KeyAt key_at, Record& low) {
    std::uint32_t least = kNaNCode, greatest = 0;
#pragma unroll 2
    for (int i = thread(); i < n; i += kThreads) {
      const std::uint32_t code = code_of(key_at(i));
      least = min(least, code);
      greatest = max(greatest, code);
    }
    least = __reduce_min_sync(kFullWarp, least);
    greatest = __reduce_max_sync(kFullWarp, greatest);
    if (lane() == 0) {
      shared.warp_low[warp()] = least;
      shared.warp_high[warp()] = greatest;
    }
    __syncthreads();
    least = __reduce_min_sync(kFullWarp, lane() < kWarps ? shared.warp_low[lane()] : kNaNCode);
    greatest = __reduce_max_sync(kFullWarp, lane() < kWarps ? shared.warp_high[lane()] : 0U);
    low = Record{least} << 32;
    return 64 - kBinBits - __clz(static_cast<int>(greatest - least));
  }

  // The bin that holds the wanted-th key, how many keys come before it and how many are inside; zeroes the bins.
  static __device__ void find_bin(Shared& shared, std::uint32_t wanted) {
    constexpr int kEach = kBins / kThreads;
    std::uint32_t count[kEach];
    std::uint32_t sum = 0;
    for (int i = 0; i < kEach; ++i) {
      count[i] = shared.bins[thread() * kEach + i];
      shared.bins[thread() * kEach + i] = 0;
      sum += count[i];
    }
    std::uint32_t up_to = sum;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(kFullWarp, up_to, step);
      if (lane() >= step) up_to += other;
    }
    if (lane() == 31) shared.warp_sum[warp()] = up_to;
    __syncthreads();
    const std::uint32_t other = lane() < warp() ? shared.warp_sum[lane()] : 0U;
    std::uint32_t before = __reduce_add_sync(kFullWarp, other) + up_to - sum;
    for (int i = 0; i < kEach; ++i) {
      if (before < wanted && wanted <= before + count[i]) {
        shared.bin = thread() * kEach + i;
        shared.before = before;
        shared.inside = count[i];
      }
      before += count[i];
    }
    __syncthreads();
  }

  // The records below `bound` to `out`, at most k; returns how many. `out` may be the buffer: a round reads before it
  // writes, and never writes past what has been read.
  static __device__ int move_below(Shared& shared, Record bound, const Record* records, int n, Record* out, int k) {
    constexpr int kRound = 2;
    __syncthreads();
    if (thread() == 0) shared.written = 0;
    for (int first = 0; first < n; first += kRound * kThreads) {
      Record record[kRound];
      for (int i = 0; i < kRound; ++i) {
        const int at = first + i * kThreads + thread();
        record[i] = at < n ? records[at] : kEveryRecord;
      }
      __syncthreads();
      for (int i = 0; i < kRound; ++i) {
        const bool stays = record[i] < bound;
        const unsigned lanes = __ballot_sync(kFullWarp, stays);
        std::uint32_t base = 0;
        if (lane() == 0 && lanes != 0) base = atomicAdd(&shared.written, __popc(lanes));
        base = __shfl_sync(kFullWarp, base, 0);
        const std::uint32_t at = base + __popc(lanes & lanes_below());
        if (stays && at < k) out[at] = record[i];
      }
    }
    __syncthreads();
    return min(static_cast<int>(shared.written), k);
  }

  Shared& shared_;
  Record* storage_;
  int capacity_;
  int k_;
  Record cut_ = kEveryRecord;
};

}  // namespace dosa::cuda
