// select: the K first records of a row, from its scores or from its survivors' records.
//
// A row is read once. From a sample comes a guess of the K-th score, a little too low; what is not below the guess goes
// to a buffer in shared memory that is compacted exactly when it is full. If the guess turns out too high (fewer than K
// records passed), the row is read again without it. So the result never depends on the guess, on the order in which
// threads run, or on how many scores are equal. A few rows are split over clusters of CTAs that share the guess.
#include <algorithm>
#include <cooperative_groups.h>
#include <cstdint>

#include "backend/cuda/launch_early.cuh"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/record_buffer.cuh"
#include "backend/cuda/rows.cuh"
#include "backend/cuda/stages.hpp"
#include "backend/cuda/write.cuh"

namespace dosa::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr std::uint32_t kSampleShare = 64;  // one element of so many is sampled,
constexpr std::uint32_t kMaxSample = 8192;  // at most
constexpr int kManyRows = 512;              // threads of a CTA where there are rows enough
constexpr int kFewRows = 1024;
constexpr int kLargestCluster = 16;    // more than 8 is not portable, but sm_90 has it
constexpr std::uint32_t kVectors = 4;  // 16-byte loads that a thread has in flight

// ------------------------------------------------------------------------------------------------ what a row is made
// of

// Scores of consecutive keys.
struct ScoreRow {
  using Element = float;
  using Vector = float4;
  static constexpr int kLanes = 4;

  const float* data;
  std::uint32_t count;
  std::uint32_t first_id;

  // Admits every record below a cut whose id is not below that of element `from`. Sharp: and no other.
  class Filter {
   public:
    __device__ Filter(Record cut, std::uint32_t from_id) {
      std::uint32_t code = code_of(cut);
      sharp_ = static_cast<std::uint32_t>(cut) <= from_id << 1;  // then equal codes lose by their ids
      if (sharp_) --code;
      everything_ = code == kNaNCode;
      if (code >= kWorstNumberCode) code = kWorstNumberCode;
      if (code == kZeroCode + 1) code = kZeroCode;
      least_ = code < kBestCode ? __uint_as_float(0x7FC00000U) : score_of_code(code);
    }
    [[nodiscard]] __device__ bool everything() const { return everything_; }
    [[nodiscard]] __device__ bool operator()(float score) const { return score >= least_; }
    [[nodiscard]] __device__ bool is_sharp() const { return sharp_; }

   private:
    float least_;  // NaN: nothing
    bool everything_;
    bool sharp_;
  };

  [[nodiscard]] __device__ ScoreRow after(std::uint32_t i) const { return {data + i, count - i, first_id + i}; }
  [[nodiscard]] __device__ Filter filter(Record cut, std::uint32_t from) const { return {cut, first_id + from}; }
  [[nodiscard]] __device__ Record record(float score, std::uint32_t i) const {
    return make_record(score, first_id + i);
  }
  static __device__ float lane(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static __device__ std::uint32_t code(float score) { return order_code(score); }
};

// Records in any order.
struct RecordRow {
  using Element = Record;
  using Vector = ulonglong2;
  static constexpr int kLanes = 2;

  const Record* data;
  std::uint32_t count;

  struct Filter {
    Record cut;
    [[nodiscard]] __device__ bool everything() const { return false; }
    [[nodiscard]] __device__ bool operator()(Record record) const { return record < cut; }
    [[nodiscard]] __device__ bool is_sharp() const { return true; }
  };

  [[nodiscard]] __device__ RecordRow after(std::uint32_t i) const { return {data + i, count - i}; }
  [[nodiscard]] __device__ Filter filter(Record cut, std::uint32_t) const { return {cut}; }
  [[nodiscard]] __device__ Record record(Record record, std::uint32_t) const { return record; }
  static __device__ Record lane(const ulonglong2& v, int i) { return i == 0 ? v.x : v.y; }
  static __device__ std::uint32_t code(Record record) { return code_of(record); }
};

// The elements of a row as 16-byte vectors, up to kLanes - 1 elements before them, and as many after.
template <class Row>
struct Vectors {
  const typename Row::Vector* data;
  std::uint32_t head;
  std::uint32_t count;
  std::uint32_t tail_at;

  Vectors() = default;
  explicit __device__ Vectors(const Row& row) {
    constexpr std::uint32_t size = sizeof(typename Row::Element);
    const auto address = reinterpret_cast<std::uintptr_t>(row.data);
    head = min(row.count, static_cast<std::uint32_t>((16 - address % 16) % 16 / size));
    count = (row.count - head) / Row::kLanes;
    tail_at = head + count * Row::kLanes;
    data = reinterpret_cast<const typename Row::Vector*>(row.data + head);
  }
};

// Which part of a row a CTA reads.
struct Share {
  std::uint32_t part;
  std::uint32_t parts;
  std::uint32_t first;  // vector
  std::uint32_t end;

  Share() = default;
  __device__ Share(std::uint32_t part_, std::uint32_t parts_, std::uint32_t vectors)
      : part(part_), parts(parts_), first(at(part_, vectors)), end(at(part_ + 1, vectors)) {}

 private:
  [[nodiscard]] __device__ std::uint32_t at(std::uint32_t p, std::uint32_t vectors) const {
    return static_cast<std::uint32_t>(std::uint64_t{vectors} * p / parts);
  }
};

// What a CTA does, in shared memory: in registers it would crowd out what the inner loop needs.
template <class Row>
struct Job {
  Row row;
  Vectors<Row> vectors;
  Share share;
  const Record* kept;
  int carried;           // records kept so far
  std::uint32_t found;   // records in all buffers of the cluster
  std::uint32_t before;  // in those of lower rank
};

// ------------------------------------------------------------------------------------------------------------ the
// guess

// Spreads a number over 32 bits, so that a row's own period does not meet the sample's.
__device__ std::uint32_t scatter(std::uint32_t x) {
  x *= 0x9E3779B1U;
  x ^= x >> 15;
  return x * 0x85EBCA77U ^ x >> 13;
}

// All threads: a cut that somewhat more than K of the row's elements are expected to be below: the K-th of the sample
// plus three standard deviations of its rank (a row in a thousand is then read twice; a looser guess costs every row
// more). Every record, where a sample says nothing. `codes` has room for the sample.
template <class Row, int kThreads>
__device__ __noinline__ Record guess_cut(const Job<Row>& job, int k, typename RecordBuffer<kThreads>::Shared& shared,
                                         std::uint32_t* codes) {
  const std::uint32_t wanted = min(max(job.row.count / kSampleShare, 256U), kMaxSample) / Row::kLanes;
  const std::uint32_t positions = min(wanted, job.vectors.count);
  const std::uint32_t sampled = positions * Row::kLanes;
  const float rank = static_cast<float>(k) * static_cast<float>(sampled) / static_cast<float>(job.row.count);
  const float target = rank + 3.0F * sqrtf(rank) + 2.0F;
  if (target >= 0.75F * static_cast<float>(sampled)) return kEveryRecord;

  const std::uint32_t stretch = job.vectors.count / positions;
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x; i < positions; i += kThreads) {
    const typename Row::Vector v = __ldg(job.vectors.data + i * stretch + scatter(i) % stretch);
    for (int c = 0; c < Row::kLanes; ++c) codes[i + c * positions] = Row::code(Row::lane(v, c));
  }
  __syncthreads();
  const Record bound = RecordBuffer<kThreads>::bound_of(shared, static_cast<int>(sampled), static_cast<int>(target), 32,
                                                        [codes](int i) { return Record{codes[i]} << 32; });
  const std::uint32_t last = code_of(bound - 1);
  return last == kNaNCode ? kEveryRecord : Record{last + 1} << 32;
}

// ------------------------------------------------------------------------------------------------------------- the
// pass

// A warp's vectors of a row: kVectors a lane, 32 apart. Sets of its elements are words, one bit an element of the lane.
template <class Row>
struct Chunk {
  static constexpr std::uint32_t kSize = kVectors * 32;
  static constexpr int kElements = kVectors * Row::kLanes;
  static_assert(kElements < 32);
  typename Row::Vector vector[kVectors];

  // `row` begins with a vector.
  __device__ void load(const Row& row, std::uint32_t first, std::uint32_t end) {
    const auto* data = reinterpret_cast<const typename Row::Vector*>(row.data);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::uint32_t at = first + j * 32 + threadIdx.x % 32;
      if (at < end) vector[j] = __ldcs(data + at);
    }
  }

  // The elements that exist and pass.
  [[nodiscard]] __device__ unsigned hits(typename Row::Filter filter, std::uint32_t first, std::uint32_t end) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (filter(Row::lane(vector[i / Row::kLanes], i % Row::kLanes))) bits |= 1U << i;
    }
    if (filter.everything()) bits = (1U << kElements) - 1;
    if (first + kSize > end) {
      const std::uint32_t lane = first + threadIdx.x % 32;
      const std::uint32_t vectors = lane < end ? min((end - lane + 31) / 32, kVectors) : 0;
      bits &= (1U << vectors * Row::kLanes) - 1;
    }
    return bits;
  }
};

// A whole warp: pushes the elements `hits` of the chunk at vector `first`, unless they cannot win; those that found no
// room come back. They are read again, from the L1 cache: the registers that held them are on to the next chunk.
template <class Row, class Buffer>
__device__ unsigned push(const Row& row, std::uint32_t first, unsigned hits, Buffer& buffer) {
  std::uint32_t place = buffer.reserve(__popc(hits));
  unsigned left = 0;
  for (; hits != 0; hits &= hits - 1) {
    const std::uint32_t b = __ffs(static_cast<int>(hits)) - 1;
    const std::uint32_t element = (first + b / Row::kLanes * 32 + threadIdx.x % 32) * Row::kLanes + b % Row::kLanes;
    const Record record = row.record(row.data[element], element);
    if (!buffer.put(place++, record)) left |= 1U << b;
  }
  return left;
}

// All threads: a whole row that fits into the buffer.
template <class Row, int kThreads>
__device__ void copy_row(const Job<Row>& job, RecordBuffer<kThreads>& buffer) {
#pragma unroll 8
  for (std::uint32_t i = threadIdx.x; i < job.row.count; i += kThreads)
    buffer.storage()[i] = job.row.record(job.row.data[i], i);
  buffer.resize(static_cast<int>(job.row.count));
}

// All threads: offers every element of this CTA's share of the row. Warps run freely until the buffer is full, then
// meet to compact it.
template <class Row, int kThreads>
__device__ void read_row(const Job<Row>& job, RecordBuffer<kThreads>& buffer) {
  // What no vector holds: the first elements for the first CTA, the last ones for the last.
  const std::uint32_t head = job.vectors.head;
  const std::uint32_t edges = head + job.row.count - job.vectors.tail_at;
  if (edges > 0) {
    const bool at_head = threadIdx.x < head;
    const bool mine = threadIdx.x < edges && job.share.part == (at_head ? 0 : job.share.parts - 1);
    const std::uint32_t element = at_head ? threadIdx.x : job.vectors.tail_at + threadIdx.x - head;
    buffer.offer(mine, mine ? job.row.record(job.row.data[element], element) : kEveryRecord);
  }

  constexpr std::uint32_t kStride = Chunk<Row>::kSize * (kThreads / 32);
  const Row row = job.row.after(head);
  const std::uint32_t end = job.share.end;
  std::uint32_t first = job.share.first + threadIdx.x / 32 * Chunk<Row>::kSize;
  Chunk<Row> chunk;
  chunk.load(row, first, end);
  unsigned waiting = 0;
  bool stuck = false;
  while (true) {
    typename Row::Filter filter = row.filter(buffer.cut(), first * Row::kLanes);
    while (first < end) {
      if (!stuck) {
        if (buffer.full()) break;
        if (!filter.is_sharp()) filter = row.filter(buffer.cut(), first * Row::kLanes);
        waiting = chunk.hits(filter, first, end);
        chunk.load(row, first + kStride, end);
      }
      if (__any_sync(kFullWarp, waiting != 0)) waiting = push(row, first, waiting, buffer);
      stuck = __any_sync(kFullWarp, waiting != 0);
      if (stuck) break;
      first += kStride;
    }
    // Whoever has not finished has seen the buffer full.
    if (__syncthreads_or(first < end) == 0) return;
    buffer.compact();
  }
}

// ---------------------------------------------------------------------------------------------------------------- a
// row

// All threads: the last of n records in the order.
template <int kThreads>
__device__ Record last_of(const Record* records, int n, RecordBuffer<kThreads>& buffer) {
  Record last = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) last = max(last, records[i]);
  for (int step = 16; step > 0; step /= 2) last = max(last, __shfl_xor_sync(kFullWarp, last, step));
  Record* of_warps = buffer.storage();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = last;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) last = max(last, of_warps[warp]);
  __syncthreads();
  return last;
}

// All threads: counts the records of the cluster.
template <class Row, class Shared>
__device__ void count_found(Job<Row>& job, Shared& shared) {
  if (job.share.parts == 1) {  // a cluster's barrier is dear
    if (threadIdx.x == 0) job.found = shared.count;
    __syncthreads();
    return;
  }
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  if (threadIdx.x < 32) {
    const std::uint32_t count =
        threadIdx.x < cluster.num_blocks() ? cluster.map_shared_rank(&shared, threadIdx.x)->count : 0;
    job.found = __reduce_add_sync(kFullWarp, count);
    job.before = __reduce_add_sync(kFullWarp, threadIdx.x < cluster.block_rank() ? count : 0);
  }
  cluster.sync();
}

// The K first of a row and of the records kept so far, to `out`, which may be the buffer; returns how many. All CTAs of a cluster
// share one row; all but the first return -1.
template <class Row, int kThreads>
__device__ int select_row(const Row& row, int topk, Record* storage, int capacity, const Record* kept, int carried, Record* out) {
  using Buffer = RecordBuffer<kThreads>;
  __shared__ typename Buffer::Shared shared;
  __shared__ Job<Row> job;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) {
    const Vectors<Row> vectors(row);
    job = {row, vectors, Share(cluster.block_rank(), cluster.num_blocks(), vectors.count), kept, carried, 0, 0};
  }
  Buffer buffer(shared, storage, capacity, topk);  // ends with a barrier

  Record cut = kEveryRecord;
  const bool guessed = carried < topk && row.count + carried > capacity;
  if (guessed) cut = guess_cut<Row, kThreads>(job, topk, shared, reinterpret_cast<std::uint32_t*>(storage));
  if (carried == topk) cut = last_of(kept, carried, buffer) + 1;  // proven: K records are below it
  while (true) {
    buffer.clear(cut);
    if (job.share.part == 0) {
      for (int first = 0; first < job.carried; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        buffer.offer(i < job.carried, i < job.carried ? job.kept[i] : kEveryRecord);
      }
    }
    if (job.share.parts == 1 && job.carried == 0 && job.row.count <= capacity) {
      copy_row(job, buffer);
    } else {
      read_row(job, buffer);
    }
    count_found(job, shared);
    const std::uint32_t found = job.found;
    if (cut == kEveryRecord || found >= topk || found >= job.row.count + job.carried) break;
    cut = kEveryRecord;
  }

  // The first CTA of the cluster takes over what the others found.
  const bool together = job.found <= static_cast<std::uint32_t>(capacity);
  if (together && job.share.parts > 1) {
    if (job.share.part > 0) {
      Record* theirs = cluster.map_shared_rank(storage, 0) + job.before;
      for (int i = threadIdx.x; i < buffer.size(); i += kThreads) theirs[i] = storage[i];
    }
    cluster.sync();
    if (job.share.part == 0) buffer.resize(static_cast<int>(job.found));
  }
  if (job.share.part == 0 && !together) {
    for (std::uint32_t p = 1; p < job.share.parts; ++p) {
      const Record* theirs = cluster.map_shared_rank(storage, p);
      const int count = cluster.map_shared_rank(&shared, p)->count;
      for (int first = 0; first < count; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        buffer.offer(i < count, i < count ? theirs[i] : kEveryRecord);
      }
    }
  }
  if (job.share.parts > 1 && !together) cluster.sync();  // the others' shared memory was being read
  return job.share.part == 0 ? buffer.write_first(out) : -1;
}

template <int kThreads, int kItems>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_scores_kernel(const __grid_constant__ SelectScoresArgs args, int capacity) {
  using Writer = RowWriter<kThreads, kItems>;
  extern __shared__ __align__(16) Record storage[];
  auto& shared = *reinterpret_cast<typename Writer::Shared*>(storage);
  ptx::wait_for_previous();
  ptx::let_next_begin();
  const std::int64_t r = blockIdx.x / cg::this_cluster().num_blocks();
  if (r >= count_of(args.pass, args.rows)) return;
  const std::int64_t slice_row = row_of(args.pass, r);
  const std::int64_t place = place_of(args.pass, slice_row);
  const Visible visible = visible_in(args.keys, args.in.ks, args.in.ke, args.first_row + slice_row);
  const std::int64_t begin = max(visible.begin, args.key_begin);
  const std::int64_t end = min(visible.end, args.key_end);
  const bool writes = args.output.ids != nullptr;
  Record* kept = args.kept + place * args.topk;
  const int carried = args.first_slice ? 0 : args.kept_count[place];
  int count = carried;
  const Record* from = kept;
  if (begin < end) {
    const ScoreRow row{args.scores + r * args.score_stride + (begin - args.key_begin),
                       static_cast<std::uint32_t>(end - begin), static_cast<std::uint32_t>(begin)};
    count = select_row<ScoreRow, kThreads>(row, args.topk, storage, capacity, kept, carried, writes ? storage : kept);
    from = storage;
  }
  if (cg::this_cluster().block_rank() != 0) return;
  if (writes) {
    Writer::write(args.output, shared, from, count, slice_row, nullptr);
  } else if (threadIdx.x == 0) {
    args.kept_count[place] = count;
  }
}

// All threads: the row is listed, to be scored in full.
__device__ void list_row(const Redo& redo, std::int64_t row) {
  if (threadIdx.x != 0) return;
  if (redo.lost != nullptr) redo.lost[row] = 1;
  redo.list[atomicAdd(redo.list_size, 1)] = static_cast<std::int32_t>(row);
}

template <int kThreads, int kItems>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_records_kernel(const __grid_constant__ SelectRecordsArgs args, int capacity) {
  using Writer = RowWriter<kThreads, kItems>;
  extern __shared__ __align__(16) Record storage[];
  auto& shared = *reinterpret_cast<typename Writer::Shared*>(storage);
  ptx::wait_for_previous();
  ptx::let_next_begin();
  const std::int64_t r = blockIdx.x / cg::this_cluster().num_blocks();
  const bool first = cg::this_cluster().block_rank() == 0;
  const OutputArgs& output = args.output;
  const Redo& redo = args.redo;
  const bool writes = output.ids != nullptr;
  if ((redo.lost != nullptr && redo.lost[r] != 0) || (redo.screened != nullptr && redo.screened[r] == 0)) {
    if (first) list_row(redo, r);
    return;
  }
  const RecordRow row{args.records + r * args.record_stride,
                      static_cast<std::uint32_t>(min(std::int64_t{args.record_count[r]}, args.record_stride))};
  Record* kept = args.kept + r * args.topk;
  const int carried = args.first_slice ? 0 : args.kept_count[r];
  int count = static_cast<int>(row.count);
  const Record* from = row.data;
  const bool all = writes && !output.ascending && count <= Writer::kMost;  // sorting them all is sooner done than selecting some
  if (!all && count > 0) {
    count = select_row<RecordRow, kThreads>(row, args.topk, storage, capacity, kept, carried, writes ? storage : kept);
    from = storage;
  } else if (!all) {
    count = carried;
  }
  if (!first) return;
  if (!writes) {
    if (threadIdx.x == 0) args.kept_count[r] = count;
  } else if (!Writer::write(output, shared, from, count, r, redo.tau == nullptr ? nullptr : redo.tau + r)) {
    list_row(redo, r);
  }
}

// -------------------------------------------------------------------------------------------------------------
// launches

// Many rows: two CTAs a multiprocessor, so that one compacts while the other reads. Few rows: as many CTAs a row as
// fill the chip, up to a cluster; clusters of 16 only where half the chip is enough, because few of them fit at a time.
struct Shape {
  int threads;
  int parts;
};

Shape shape_for(std::int64_t rows, int multiprocessors) {
  if (rows > multiprocessors) return {kManyRows, 1};
  int parts = 1;
  while (2 * parts <= kLargestCluster && 2 * parts * rows <= (parts < 8 ? multiprocessors : multiprocessors / 2))
    parts *= 2;
  return {kFewRows, parts};
}

// Records in the buffer: room for K and for what a guess lets through (4000 for K = 2048 and a million keys).
constexpr int capacity_for(int topk) { return topk <= 2048 ? 8192 : 12288; }

template <class Writer, class Args>
cudaError_t launch(void (*kernel)(Args, int), const Args& args, Shape shape, cudaStream_t stream) {
  const int capacity = capacity_for(args.topk);
  const std::size_t bytes = std::max(static_cast<std::size_t>(capacity) * sizeof(Record), sizeof(typename Writer::Shared));
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  if (shape.parts > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  return launch_early(kernel, args.rows * shape.parts, shape.threads, bytes, shape.parts, stream, args, capacity);
}

template <int kThreads, int kItems>
cudaError_t launch_as(const SelectScoresArgs& args, Shape shape, cudaStream_t stream) {
  return launch<RowWriter<kThreads, kItems>>(select_scores_kernel<kThreads, kItems>, args, shape, stream);
}

template <int kThreads, int kItems>
cudaError_t launch_as(const SelectRecordsArgs& args, Shape shape, cudaStream_t stream) {
  return launch<RowWriter<kThreads, kItems>>(select_records_kernel<kThreads, kItems>, args, shape, stream);
}

template <class Args>
cudaError_t launch_in(const Args& args, Shape shape, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  if (shape.threads == kFewRows) return launch_as<kFewRows, 4>(args, shape, stream);
  return args.topk <= 2048 ? launch_as<kManyRows, 4>(args, shape, stream) : launch_as<kManyRows, 8>(args, shape, stream);
}

}  // namespace

cudaError_t launch_select_scores(const SelectScoresArgs& args, int multiprocessors, cudaStream_t stream) {
  return launch_in(args, shape_for(args.rows, multiprocessors), stream);
}

cudaError_t launch_select_records(const SelectRecordsArgs& args, int multiprocessors, cudaStream_t stream) {
  Shape shape = shape_for(args.rows, multiprocessors);
  if (args.record_stride <= capacity_for(args.topk)) shape.parts = 1;  // then they are copied, not read: a cluster's barriers are dear
  return launch_in(args, shape, stream);
}

}  // namespace dosa::cuda
