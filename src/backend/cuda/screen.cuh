// screen: the bound of every key against tau, by the row budget. A bit a pair comes out.
//
// A = keys, 64 a warpgroup; B = the bound rows of 8 or 16 queries (ScreenTile). Tensor cores give the dots, tensor cores sum
// them over a query's heads, weighted; what is left per pair of query and key is four multiply-adds and a shift.
#pragma once

#include "backend/cuda/layout.hpp"
#include "backend/cuda/order.cuh"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/wgmma.cuh"

namespace dosa::cuda {

inline constexpr int kStepsOfRun = 16;  // stages of a super; a warpgroup's keys of one are a run of the mask

struct ScreenWork {
  ScreenArgs args;
  int chunk_keys;  // a multiple of a super's keys
  int chunks;
};

/// One warp: finds the units that their rows can see, and brings bound rows, weights and bounds' constants, one unit ahead.
template <int kBudget>
__device__ __forceinline__ void bring_bounds(ScreenShared<kBudget>& shared, const ScreenWork& work, int lane) {
  using Tile = ScreenTile<kBudget>;
  constexpr int kSuperKeys = Tile::Shape::kStageKeys * kStepsOfRun;
  const ScreenArgs& args = work.args;
  const int listed = *args.list_size;
  const int tiles = (listed + Tile::kQueries - 1) / Tile::kQueries;
  const std::int64_t units = static_cast<std::int64_t>(tiles) * work.chunks;
  int buffer = 0;
  unsigned parity = 1;

  for (std::int64_t u = blockIdx.x; u < units; u += gridDim.x) {
    // The visible keys of the tile's rows, within the chunk. Lane i knows query i.
    const int chunk = static_cast<int>(u / tiles);
    const int at = static_cast<int>(u - static_cast<std::int64_t>(chunk) * tiles) * Tile::kQueries + lane;
    const int chunk_begin = chunk * work.chunk_keys;
    const int chunk_end = min(chunk_begin + work.chunk_keys, args.keys.count);
    ScreenQuery mine{0.0F, 0.0F, 0.0F, 0.0F, -1, 0, 0};
    if (lane < Tile::kQueries && at < listed) {
      mine.row = args.list[at];
      const std::int64_t query = args.first_row + mine.row;
      const Visible visible = visible_in(args.keys, args.ks, args.ke, query);
      mine.begin = static_cast<int>(visible.begin);
      mine.end = static_cast<int>(visible.end);
    }
    const bool sees = max(mine.begin, chunk_begin) < min(mine.end, chunk_end);
    const int begin = __reduce_min_sync(0xFFFFFFFFU, sees ? max(mine.begin, chunk_begin) : chunk_end);
    const int end = __reduce_max_sync(0xFFFFFFFFU, sees ? min(mine.end, chunk_end) : chunk_begin);
    if (begin >= end) continue;
    const int key = chunk_begin + (begin - chunk_begin) / kSuperKeys * kSuperKeys;
    const int supers = (end - key + kSuperKeys - 1) / kSuperKeys;
    if (mine.row >= 0) {
      mine.c = args.c[mine.row];
      mine.tau = args.tau[mine.row];
      mine.sigma_high = args.sigma[2 * mine.row];
      mine.sigma_low = args.sigma[2 * mine.row + 1];
    }

    // Bound rows in the order of the tile's columns; those of queries that do not exist are zero.
    ptx::wait(&shared.unit_empty[buffer], parity);
    const std::uint32_t to = ptx::shared(shared.rows[buffer]);
#pragma unroll 2
    for (int first = 0; first < Tile::kColumns; first += 4) {
      const int column = first + lane / 8;
      const int row = __shfl_sync(0xFFFFFFFFU, mine.row, Tile::query(column));
      const std::uint8_t* from = args.bound_rows + max(row, 0) * args.bound_stride + Tile::row(column) * kDim + lane % 8 * 16;
      ptx::copy_16(to + swizzled(column, lane % 8), from, row >= 0);
    }
#pragma unroll 2
    for (int query = 0; query < Tile::kQueries; ++query) {
      const int row = __shfl_sync(0xFFFFFFFFU, mine.row, query);
      if (lane < Tile::kRetained) {
        shared.weights[buffer][query][lane] = row >= 0 ? args.weight[row * args.weight_stride + lane] : std::uint16_t{0};
      }
    }
    if (lane < Tile::kQueries) shared.query[buffer][lane] = mine;
    if (lane == 0) shared.unit[buffer] = ScreenUnit{key, supers};
    ptx::commit_copies();
    ptx::wait_copies<0>();
    ptx::fence_async();
    ptx::arrive(&shared.unit_full[buffer]);
    parity ^= static_cast<unsigned>(buffer);
    buffer ^= 1;
  }

  // The end.
  ptx::wait(&shared.unit_empty[buffer], parity);
  if (lane == 0) shared.unit[buffer] = ScreenUnit{0, 0};
  ptx::arrive(&shared.unit_full[buffer]);
}

/// One warp: keys by the copy engine, what is known of each by plain copies, up to kStages ahead.
template <int kBudget>
__device__ __forceinline__ void bring_screened_keys(ScreenShared<kBudget>& shared, const CUtensorMap& map, const ScreenWork& work,
                                                    int lane) {
  using Shape = typename ScreenTile<kBudget>::Shape;
  const ScreenArgs& args = work.args;
  const int count = args.keys.count;
  int stage = 0;
  unsigned parity = 1;

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScreenUnit unit = shared.unit[buffer];
    __syncwarp();
    if (lane == 0) ptx::arrive(&shared.unit_empty[buffer]);
    if (unit.supers == 0) break;
    for (int s = 0; s < unit.supers * kStepsOfRun; ++s) {
      ptx::wait(&shared.keys_empty[stage], parity);
      ptx::Barrier* full = &shared.keys_full[stage];
      if (lane == 0) ptx::arrive_and_expect(full, Shape::kStageKeys * kDim);
      __syncwarp();
      // 64 keys of each warpgroup's run.
      const int super = unit.key + s / kStepsOfRun * (Shape::kWarpgroups * kMaskRun) + s % kStepsOfRun * 64;
#pragma unroll
      for (int w = 0; w < Shape::kWarpgroups; ++w) {
        const int key = super + w * kMaskRun;
        if (lane == 0) ptx::copy_box(shared.keys[stage] + w * 64 * kDim, &map, 0, key, full);
#pragma unroll
        for (int i = 0; i < 64; i += 32) {
          const std::uint32_t to = ptx::shared(&shared.key[stage][w * 64 + i + lane]);
          const bool exists = key + i + lane < count;
          const int from = exists ? key + i + lane : 0;
          ptx::copy_4(to, args.rho + from, exists);
          ptx::copy_4(to + 4, args.inv_alpha + from, exists);
        }
      }
      ptx::arrive_after_copies(full);
      stage = stage + 1 == ScreenShared<kBudget>::kStages ? 0 : stage + 1;
      parity ^= stage == 0 ? 1U : 0U;
    }
  }
}

/// Positive parts of two dots as bf16, the first in the low half.
__device__ __forceinline__ std::uint32_t relu_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// d += 16 keys x 16 columns times 16 columns x 8 queries.
__device__ __forceinline__ void add_heads(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                          const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

/// Bits of the steps of a run in which a lane's key of `half`, `key` in step 0, lies before `end`.
__device__ __forceinline__ std::uint32_t bits_before(int end, int key, int half) {
  const int steps = min(max((end - key + 63) >> 6, 0), kStepsOfRun);
  return ~__funnelshift_rc(0xFFFFFFFFU, 0U, 2 * steps) & (half == 0 ? 0xAAAAAAAAU : 0x55555555U);
}

/// A math warpgroup.
template <int kBudget>
__device__ __forceinline__ void screen_keys(ScreenShared<kBudget>& shared, const ScreenWork& work, int warpgroup) {
  using Tile = ScreenTile<kBudget>;
  using Shape = typename Tile::Shape;
  constexpr int kBlocks = Tile::kPassColumns / 8;
  const ScreenArgs& args = work.args;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int in_quad = lane % kQuad;
  const int in_block = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / kQuad;  // key of accumulator row g, of 64
  unsigned parity = 0;
  float dot[Tile::kPassColumns / 2];

  for (int n = 0;; ++n) {
    const int buffer = n & 1;
    ptx::wait(&shared.unit_full[buffer], n >> 1 & 1);
    const ScreenUnit unit = shared.unit[buffer];
    if (unit.supers == 0) break;

    // What stays in registers for the unit: weights as block-diagonal B fragments (column k of a step weighs in the sum of its
    // own query alone; this lane holds the columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of query g), and the constants of this lane's
    // two queries a group.
    std::uint32_t weight[Tile::kGroups][Tile::kGroupSteps][2];
    float4 constants[Tile::kGroups][2];  // c, tau, sigma high, sigma low
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group) {
      const std::uint16_t* own = shared.weights[buffer][group * 8 + lane / kQuad];
#pragma unroll
      for (int step = 0; step < Tile::kGroupSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          std::uint32_t pair = 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = 16 * step + 8 * i + 2 * in_quad + e - lane / kQuad * Tile::kRetained;
            const bool is_own = j >= 0 && j < Tile::kRetained;
            pair |= (is_own ? std::uint32_t{own[j]} : 0U) << (16 * e);
          }
          weight[group][step][i] = pair;
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        constants[group][e] = *reinterpret_cast<const float4*>(&shared.query[buffer][group * 8 + 2 * in_quad + e].c);
      }
    }
    std::uint32_t rejected[Tile::kGroups][2];
    const std::uint32_t rows = rows_at(shared.rows[buffer]);
    const std::uint32_t keys = rows_at(shared.keys[0]) + warpgroup * (64 * kDim >> 4);

    // Dots, bounds and decisions of a stage's keys.
    const auto screen_stage = [&](int stage) {
      float u[Tile::kGroups][4];  // by key half and query
      ptx::wait(&shared.keys_full[stage], parity);
#pragma unroll
      for (int pass = Tile::kPasses - 1; pass >= 0; --pass) {
        multiply<Tile::kPassColumns>(dot, keys + stage * (Shape::kStageKeys * kDim >> 4),
                                     rows + pass * (Tile::kPassColumns * kDim >> 4));
        const ScreenKey* known = &shared.key[stage][warpgroup * 64 + in_block];
        const ScreenKey key[2] = {known[0], known[8]};
        wgmma_wait<0>(dot);
        if (pass == 0) {
          __syncwarp();
          if (ptx::elect()) ptx::arrive(&shared.keys_empty[stage]);
        }
        // rho c - tau / alpha, minus the auxiliary pair, in f32.
        if (pass == Tile::kPasses - 1) {
#pragma unroll
          for (int group = 0; group < Tile::kGroups; ++group) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const auto [c, tau, sigma_high, sigma_low] = constants[group][e];
              const int j = (Tile::kAuxiliary + group * 16) / 8 + e - pass * kBlocks;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                float bound = __fmaf_rn(-tau, key[half].inv_alpha, __fmul_rn(key[half].rho, c));
                bound = __fmaf_rn(-sigma_high, dot[4 * j + 2 * half], bound);
                u[group][2 * half + e] = __fmaf_rn(-sigma_low, dot[4 * j + 2 * half + 1], bound);
              }
            }
          }
        }
        // The retained heads: two accumulator blocks are an A fragment.
#pragma unroll
        for (int group = 0; group < Tile::kGroups; ++group) {
#pragma unroll
          for (int s = 0; s < Tile::kGroupSteps; ++s) {
            const int j = (group * Tile::kGroupSteps + s) * 2 - pass * kBlocks;
            if (j >= 0 && j < kBlocks) {
              add_heads(u[group], relu_pair(dot[4 * j], dot[4 * j + 1]), relu_pair(dot[4 * j + 2], dot[4 * j + 3]),
                        relu_pair(dot[4 * j + 4], dot[4 * j + 5]), relu_pair(dot[4 * j + 6], dot[4 * j + 7]), weight[group][s]);
            }
          }
        }
      }
      // Rejected: the sign.
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rejected[group][i % 2] = __funnelshift_l(__float_as_uint(u[group][i]), rejected[group][i % 2], 1);
        }
        asm volatile("" : "+r"(rejected[group][0]), "+r"(rejected[group][1]));  // or all of it sinks past the next product
      }
    };
    // A word a query: survivors and exempt keys that the query sees.
    const auto write = [&](int super) {
      const int run_key = unit.key + super * (Shape::kWarpgroups * kMaskRun) + warpgroup * kMaskRun;
      if (run_key >= args.keys.count) return;
      const int word = in_block / 16 * 8 + in_block % 8;  // of the run
      const std::int64_t at = run_key / kMaskRun * kMaskRunWords + word;
      const std::uint32_t exempt = args.exempt != nullptr ? args.exempt[at] : 0U;
#pragma unroll
      for (int group = 0; group < Tile::kGroups; ++group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const ScreenQuery& query = shared.query[buffer][group * 8 + 2 * in_quad + e];
          std::uint32_t visible = 0;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = run_key + in_block + 8 * half;
            visible |= bits_before(query.end, key, half) & ~bits_before(query.begin, key, half);
          }
          if (query.row >= 0) args.mask[query.row * args.mask_stride + at] = (~rejected[group][e] | exempt) & visible;
        }
      }
    };

    constexpr int kRingsOfRun = kStepsOfRun / Shape::kStages;
    constexpr int kUnrolled = Tile::kGroups * Tile::kPassColumns > 256 ? 2 : Shape::kStages;  // the widest tile needs its registers
#pragma unroll 1
    for (int ring = 0; ring < unit.supers * kRingsOfRun; ++ring) {
#pragma unroll kUnrolled
      for (int stage = 0; stage < Shape::kStages; ++stage) screen_stage(stage);
      parity ^= 1U;
      if (ring % kRingsOfRun == kRingsOfRun - 1) write(ring / kRingsOfRun);
    }
    __syncwarp();
    if (ptx::elect()) ptx::arrive(&shared.unit_empty[buffer]);
  }
}

template <int kBudget>
__global__ void __launch_bounds__(ScreenTile<kBudget>::Shape::kThreads, 1)
    screen_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ScreenWork work) {
  using Shape = typename ScreenTile<kBudget>::Shape;
  extern __shared__ __align__(1024) std::uint8_t raw[];
  auto& shared = *reinterpret_cast<ScreenShared<kBudget>*>(raw);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 32, 0);
  const int warpgroup = warp / 4;

  if (threadIdx.x == 0) {
    constexpr int kMathWarps = Shape::kWarpgroups * 4;
    for (int i = 0; i < ScreenShared<kBudget>::kStages; ++i) {
      ptx::init(&shared.keys_full[i], 1 + 32);
      ptx::init(&shared.keys_empty[i], kMathWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init(&shared.unit_full[i], 32);
      ptx::init(&shared.unit_empty[i], kMathWarps + 1);
    }
    ptx::fence_init();
  }
  __syncthreads();

  if (warpgroup == Shape::kWarpgroups) {
    ptx::drop_registers<Shape::kCopyRegisters>();
    if (warp % 4 == 0) {
      bring_bounds(shared, work, lane);
    } else if (warp % 4 == 1) {
      bring_screened_keys(shared, map, work, lane);
    }
  } else {
    ptx::raise_registers<Shape::kMathRegisters>();
    screen_keys(shared, work, warpgroup);
  }
}

}  // namespace dosa::cuda
