// What became of a row, added up.
#pragma once

#include "backend/cuda/order.cuh"

namespace dosa::cuda {

__device__ __forceinline__ void add(std::uint64_t& counter, std::int64_t value) {
  if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(value));
}

/// One thread: row `row` of the slice, at the end of its way.
__device__ __forceinline__ void count_row(const OutputArgs& args, std::int64_t row) {
  const Inputs& in = args.in;
  Counters& counters = *args.counters;
  const std::int64_t query = args.first_row + row;
  const std::int64_t ks = in.ks == nullptr ? 0 : in.ks[query];
  const std::int64_t ke = in.ke == nullptr ? in.nk : in.ke[query];
  const std::int64_t begin = ks < 0 ? 0 : ks > in.nk ? in.nk : ks;
  const std::int64_t end = ke < begin ? begin : ke > in.nk ? in.nk : ke;
  const std::int64_t visible = end - begin;
  if (ks < 0 || ks > in.nk || ke < 0 || ke > in.nk) add(counters.clamped_rows, 1);
  add(counters.visible, visible);

  const bool by_method = args.budget == nullptr;
  const bool screened = !by_method && args.screened[row] != 0;
  const bool sampled = args.sample.count > 0;
  const bool hinted = args.hinted >= 0;
  const bool lost = (screened || sampled || hinted) && args.lost[row] != 0;
  if (hinted) {
    add(counters.seeds, visible > 0 ? args.hinted : 0);
  } else if (args.seed_count == nullptr) {
    add(counters.seeds, keys_before(args.sample, end) - keys_before(args.sample, begin));
  } else if (args.budget[row] != 0 && visible >= args.min_context) {
    add(counters.seeds, args.seed_count[row / group_rows(in.heads)]);
  }
  if (screened) {
    add(counters.screened, visible);
    add(counters.bound_rows, args.screened[row]);
  }
  if (!screened) add(counters.scored_in_full, visible);
  if (lost) add(counters.scored_in_full, visible);

  std::uint64_t& path = visible == 0                       ? counters.empty
                        : visible <= args.topk             ? counters.short_rows
                        : hinted                           ? (lost ? counters.full_loose : counters.dosa)
                        : by_method                        ? counters.full
                        : screened                         ? (lost ? counters.full_loose : counters.dosa)
                        : visible < args.min_context       ? counters.full_context
                        : args.budget[row] == 0            ? counters.full_loose
                                                           : counters.full_exempt;
  add(path, 1);
}

}  // namespace dosa::cuda
