// select: the K first records of a row, from its scores or from its survivors' records.
//
// A row is read once. From a sample comes a guess of the K-th score, a little too low; what is not below the guess goes to a
// buffer in shared memory that is compacted exactly when it is full. If the guess turns out too high (fewer than K records
// passed), the row is read again without it. So the result never depends on the guess, on the order in which threads run,
// or on how many scores are equal. A few rows are split over clusters of CTAs that share the guess.
#include <algorithm>
#include <cstdint>

#include <cooperative_groups.h>
#include <cuda/ptx>

#include "backend/cuda/order.cuh"
#include "backend/cuda/record_buffer.cuh"
#include "backend/cuda/stages.hpp"

namespace dosa::cuda {
namespace {

namespace cg = cooperative_groups;
namespace ptx = ::cuda::ptx;

constexpr int kLargestCluster = 8;          // portable
constexpr std::uint32_t kMaxSample = 8192;  // sampled elements
constexpr int kStages = 4;                  // tiles in flight

// ------------------------------------------------------------------------------------------------ what a row is made of

// Scores of consecutive keys.
struct ScoreRow {
  using Element = float;
  using Vector = float4;
  static constexpr int kLanes = 4;
  static constexpr std::uint32_t kSampleShare = 64;  // one element of so many is sampled

  const float* data;
  std::uint32_t count;
  std::uint32_t first_id;

  // Admits every record below a cut whose id is not below that of element `from`; a few more, if ids lie below it.
  class Filter {
   public:
    __device__ Filter(Record cut, std::uint32_t from_id) {
      std::uint32_t code = code_of(cut);
      if (static_cast<std::uint32_t>(cut) <= from_id << 1) --code;  // equal codes lose by their ids
      everything_ = code == kNaNCode;
      if (code >= kWorstNumberCode) code = kWorstNumberCode;
      if (code == kZeroCode + 1) code = kZeroCode;
      least_ = code < kBestCode ? __uint_as_float(0x7FC00000U) : score_of_code(code);
    }
    [[nodiscard]] __device__ bool operator()(float score) const { return everything_ || score >= least_; }
    [[nodiscard]] __device__ bool any(const float4& v) const {
      return everything_ | (v.x >= least_) | (v.y >= least_) | (v.z >= least_) | (v.w >= least_);
    }

   private:
    float least_;  // NaN: nothing
    bool everything_;
  };

  [[nodiscard]] __device__ Filter filter(Record cut, std::uint32_t from) const { return {cut, first_id + from}; }
  [[nodiscard]] __device__ Record record(float score, std::uint32_t i) const { return make_record(score, first_id + i); }
  static __device__ float lane(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static __device__ std::uint32_t code(float score) { return order_code(score); }
};

// Records in any order.
struct RecordRow {
  using Element = Record;
  using Vector = ulonglong2;
  static constexpr int kLanes = 2;
  static constexpr std::uint32_t kSampleShare = 32;

  const Record* data;
  std::uint32_t count;

  struct Filter {
    Record cut;
    [[nodiscard]] __device__ bool operator()(Record record) const { return record < cut; }
    [[nodiscard]] __device__ bool any(const ulonglong2& v) const { return (v.x < cut) | (v.y < cut); }
  };

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

  explicit __device__ Vectors(const Row& row) {
    constexpr std::uint32_t size = sizeof(typename Row::Element);
    const auto address = reinterpret_cast<std::uintptr_t>(row.data);
    head = min(row.count, static_cast<std::uint32_t>((16 - address % 16) % 16 / size));
    count = (row.count - head) / Row::kLanes;
    tail_at = head + count * Row::kLanes;
    data = reinterpret_cast<const typename Row::Vector*>(row.data + head);
  }
};

// ------------------------------------------------------------------------------------------------------------ the guess

// Spreads a number over 32 bits, so that a row's own period does not meet the sample's.
__device__ std::uint32_t scatter(std::uint32_t x) {
  x *= 0x9E3779B1U;
  x ^= x >> 15;
  return x * 0x85EBCA77U ^ x >> 13;
}

// All threads: a cut that about 1.1 K to 3 K of the row's elements are expected to be below: the K-th of the sample plus five standard
// deviations of its rank. Every record, where a sample says nothing. Uses the buffer's storage.
template <class Row, int kThreads>
__device__ Record guess_cut(const Row& row, const Vectors<Row>& vectors, int k, RecordBuffer<kThreads>& buffer) {
  const std::uint32_t wanted = min(max(row.count / Row::kSampleShare, 256U), kMaxSample) / Row::kLanes;
  const std::uint32_t positions = min(wanted, vectors.count);
  const std::uint32_t sampled = positions * Row::kLanes;
  const float rank = static_cast<float>(k) * static_cast<float>(sampled) / static_cast<float>(row.count);
  const float target = rank + 5.0F * sqrtf(rank) + 4.0F;
  if (target >= 0.75F * static_cast<float>(sampled)) return kEveryRecord;

  auto* codes = reinterpret_cast<std::uint32_t*>(buffer.storage());
  const std::uint32_t stretch = vectors.count / positions;
  for (std::uint32_t i = threadIdx.x; i < positions; i += kThreads) {
    const typename Row::Vector v = __ldg(vectors.data + i * stretch + scatter(i) % stretch);
    for (int c = 0; c < Row::kLanes; ++c) codes[i + c * positions] = Row::code(Row::lane(v, c));
  }
  __syncthreads();
  const Record bound = RecordBuffer<kThreads>::bound_of(buffer.shared(), static_cast<int>(sampled), static_cast<int>(target), 32,
                                                        [codes](int i) { return Record{codes[i]} << 32; });
  const std::uint32_t last = code_of(bound - 1);
  return last == kNaNCode ? kEveryRecord : Record{last + 1} << 32;
}

// ------------------------------------------------------------------------------------------------------------- the pass

// Tiles of one vector a thread on their way from device memory, by bulk copies into a ring of shared memory.
template <class Row, int kThreads>
class TileRing {
 public:
  using Vector = typename Row::Vector;
  static constexpr int kBytes = kStages * kThreads * 16;

  struct Shared {
    std::uint64_t full[kStages];
  };

  __device__ TileRing(Shared& shared, Vector* storage) : shared_(shared), storage_(storage) {
    if (threadIdx.x == 0) {
      for (std::uint64_t& barrier : shared_.full) ptx::mbarrier_init(&barrier, 1);
      ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    }
    __syncthreads();
  }

  /// All threads: starts reading `data` up to `end` vectors, from `first`. Every tile started before has been taken.
  __device__ void start(const Vector* data, std::uint32_t first, std::uint32_t end) const {
    for (int i = 0; i < kStages; ++i) copy(data, first + i * kThreads, end, (taken_ + i) % kStages);
  }

  /// All threads: this thread's vector of the next tile; what lies past the end is unspecified.
  __device__ Vector take() const {
    const std::uint32_t stage = taken_ % kStages;
    while (!ptx::mbarrier_try_wait_parity(&shared_.full[stage], taken_ / kStages % 2)) {
    }
    return storage_[stage * kThreads + threadIdx.x];
  }

  /// All threads, after a barrier: the place of the tile at `first` takes a later one.
  __device__ void release(const Vector* data, std::uint32_t first, std::uint32_t end) {
    copy(data, first + kStages * kThreads, end, taken_ % kStages);
    ++taken_;
  }

 private:
  __device__ void copy(const Vector* data, std::uint32_t first, std::uint32_t end, std::uint32_t stage) const {
    if (threadIdx.x != 0 || first >= end) return;
    const std::uint32_t bytes = min(end - first, static_cast<std::uint32_t>(kThreads)) * 16;
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &shared_.full[stage], bytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, storage_ + stage * kThreads, data + first, bytes,
                       &shared_.full[stage]);
  }

  Shared& shared_;
  Vector* storage_;
  std::uint32_t taken_ = 0;  // tiles
};

// Which part of a row a CTA reads.
struct Share {
  std::uint32_t part;
  std::uint32_t parts;
  std::uint32_t first;  // vector
  std::uint32_t end;

  __device__ Share(std::uint32_t part_, std::uint32_t parts_, std::uint32_t vectors)
      : part(part_), parts(parts_), first(at(part_, vectors)), end(at(part_ + 1, vectors)) {}

 private:
  [[nodiscard]] __device__ std::uint32_t at(std::uint32_t p, std::uint32_t vectors) const {
    return static_cast<std::uint32_t>(std::uint64_t{vectors} * p / parts);
  }
};

// All threads: offers every element of this CTA's share of the row. The ring has been started.
template <class Row, int kThreads>
__device__ void read_row(const Row& row, const Vectors<Row>& vectors, const Share& share, TileRing<Row, kThreads>& ring,
                         RecordBuffer<kThreads>& buffer) {
  // What no vector holds: the first elements for the first CTA, the last ones for the last.
  const std::uint32_t edges = vectors.head + row.count - vectors.tail_at;
  if (edges > 0) {
    const bool at_head = threadIdx.x < vectors.head;
    const bool mine = threadIdx.x < edges && share.part == (at_head ? 0 : share.parts - 1);
    const std::uint32_t element = at_head ? threadIdx.x : vectors.tail_at + threadIdx.x - vectors.head;
    buffer.offer(mine, mine ? row.record(row.data[element], element) : kEveryRecord);
  }
  for (std::uint32_t first = share.first; first < share.end; first += kThreads) {
    const typename Row::Vector vector = ring.take();
    const std::uint32_t element = vectors.head + (first + threadIdx.x) * Row::kLanes;
    // One bit an element that has still to be offered.
    unsigned waiting = first + threadIdx.x < share.end ? (1U << Row::kLanes) - 1 : 0;
    while (true) {
      const Record cut = buffer.cut();
      const typename Row::Filter filter = row.filter(cut, vectors.head + first * Row::kLanes);
      if (__any_sync(kFullWarp, (waiting != 0) & filter.any(vector))) {
#pragma unroll
        for (int c = 0; c < Row::kLanes; ++c) {
          const typename Row::Element value = Row::lane(vector, c);
          const Record record = row.record(value, element + c);
          const bool taken = (waiting >> c & 1) != 0 && filter(value) && record < cut;
          if (!buffer.push(taken, record)) waiting &= ~(1U << c);
        }
      } else {
        waiting = 0;
      }
      if (__syncthreads_or(static_cast<int>(waiting)) == 0) break;
      buffer.compact();
    }
    ring.release(vectors.data, first, share.end);
  }
}

// ---------------------------------------------------------------------------------------------------------------- a row

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

// The K first of a row and of the records kept so far. All CTAs of a cluster share one row.
template <class Row, int kThreads>
__device__ void select_row(const Row& row, int topk, int capacity, Record* kept, std::int32_t* kept_count, int carried) {
  using Buffer = RecordBuffer<kThreads>;
  using Ring = TileRing<Row, kThreads>;
  extern __shared__ __align__(128) unsigned char dynamic[];  // the ring's tiles, then the buffer's records
  __shared__ typename Buffer::Shared shared;
  __shared__ typename Ring::Shared shared_ring;
  const cg::cluster_group cluster = cg::this_cluster();
  const Vectors<Row> vectors(row);
  const Share share(cluster.block_rank(), cluster.num_blocks(), vectors.count);
  Ring ring(shared_ring, reinterpret_cast<typename Row::Vector*>(dynamic));
  ring.start(vectors.data, share.first, share.end);
  auto* storage = reinterpret_cast<Record*>(dynamic + Ring::kBytes);
  Buffer buffer(shared, storage, capacity, topk);

  // What is proven: with K records kept, no record after the last of them can win.
  const Record proven = carried == topk ? last_of(kept, carried, buffer) + 1 : kEveryRecord;
  Record guess = kEveryRecord;
  if (carried < topk && row.count + carried > capacity) guess = guess_cut(row, vectors, topk, buffer);

  while (true) {
    buffer.clear(min(proven, guess));
    if (share.part == 0) {
      for (int first = 0; first < carried; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        buffer.offer(i < carried, i < carried ? kept[i] : kEveryRecord);
      }
    }
    read_row(row, vectors, share, ring, buffer);
    std::uint32_t found = buffer.size();
    if (share.parts > 1) {
      cluster.sync();
      found = 0;
      for (std::uint32_t p = 0; p < share.parts; ++p) found += cluster.map_shared_rank(&shared, p)->count;
      cluster.sync();
    }
    if (guess == kEveryRecord || found >= topk || found >= row.count + carried) break;
    guess = kEveryRecord;
    ring.start(vectors.data, share.first, share.end);
  }

  if (share.part == 0) {
    for (std::uint32_t p = 1; p < share.parts; ++p) {
      const Record* theirs = cluster.map_shared_rank(storage, p);
      const int count = cluster.map_shared_rank(&shared, p)->count;
      for (int first = 0; first < count; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        buffer.offer(i < count, i < count ? theirs[i] : kEveryRecord);
      }
    }
    const int written = buffer.write_first(kept);
    if (threadIdx.x == 0) *kept_count = written;
  }
  if (share.parts > 1) cluster.sync();  // the others' shared memory was being read
}

// ------------------------------------------------------------------------------------------------------------- launches

template <int kThreads>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_scores_kernel(SelectScoresArgs args, int capacity) {
  const std::int64_t r = blockIdx.x / cg::this_cluster().num_blocks();
  const Visible visible = visible_keys(args.in, args.first_row + r);
  const std::int64_t begin = max(visible.begin, args.key_begin);
  const std::int64_t end = min(visible.end, args.key_end);
  std::int32_t* kept_count = args.kept_count + r;
  if (begin >= end) {
    if (args.first_slice && cg::this_cluster().block_rank() == 0 && threadIdx.x == 0) *kept_count = 0;
    return;
  }
  const ScoreRow row{args.scores + r * args.score_stride + (begin - args.key_begin), static_cast<std::uint32_t>(end - begin),
                     static_cast<std::uint32_t>(begin)};
  select_row<ScoreRow, kThreads>(row, args.topk, capacity, args.kept + r * args.topk, kept_count,
                                 args.first_slice ? 0 : *kept_count);
}

template <int kThreads>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_records_kernel(SelectRecordsArgs args, int capacity) {
  const std::int64_t r = blockIdx.x / cg::this_cluster().num_blocks();
  std::int32_t* kept_count = args.kept_count + r;
  const std::int32_t count = args.record_count[r];
  if (count <= 0) {
    if (cg::this_cluster().block_rank() == 0 && threadIdx.x == 0) *kept_count = 0;
    return;
  }
  const RecordRow row{args.records + args.record_offset[r], static_cast<std::uint32_t>(count)};
  select_row<RecordRow, kThreads>(row, args.topk, capacity, args.kept + r * args.topk, kept_count, 0);
}

// Many rows: two CTAs of 512 threads a multiprocessor, so that one compacts while the other reads. Few rows: as many CTAs of
// 1024 threads a row as fill the chip, up to a cluster.
struct Shape {
  int threads;
  int parts;
};

Shape shape_for(std::int64_t rows, int multiprocessors) {
  if (rows > multiprocessors) return {512, 1};
  int parts = 1;
  while (2 * parts <= kLargestCluster && 2 * parts * rows <= multiprocessors) parts *= 2;
  return {1024, parts};
}

// Records in the buffer: room for K and for what a guess lets through (about 5 K for K = 2048 and a million keys).
constexpr int capacity_for(int topk) { return topk <= 2048 ? 8192 : 9216; }

template <class Args>
cudaError_t launch(void (*kernel)(Args, int), const Args& args, std::int64_t rows, int topk, Shape shape, cudaStream_t stream) {
  const int capacity = capacity_for(topk);
  const std::size_t bytes = static_cast<std::size_t>(capacity) * sizeof(Record) + static_cast<std::size_t>(shape.threads) * 16 * kStages;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * shape.parts));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, capacity);
}

}  // namespace

cudaError_t launch_select_scores(const SelectScoresArgs& args, int multiprocessors, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Shape shape = shape_for(args.rows, multiprocessors);
  return launch(shape.threads == 512 ? select_scores_kernel<512> : select_scores_kernel<1024>, args, args.rows, args.topk, shape,
                stream);
}

cudaError_t launch_select_records(const SelectRecordsArgs& args, int multiprocessors, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const Shape shape = shape_for(args.rows, multiprocessors);
  return launch(shape.threads == 512 ? select_records_kernel<512> : select_records_kernel<1024>, args, args.rows, args.topk, shape,
                stream);
}

}  // namespace dosa::cuda
