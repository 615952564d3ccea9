#include "dosa/decode.hpp"

#include "base/check.hpp"
#include "base/error.hpp"

namespace dosa {
namespace {

constexpr std::int64_t kMostDraftTokens = 8;

}  // namespace

Result<Problem> decode_problem(const DecodeStep& step) {
  const auto wrong = [](std::string what) { return fail(ErrorCode::invalid_argument, std::move(what)); };
  if (step.q.rank != 4)
    return wrong(fmt::format("q has {} dimensions; it must be [B, next_n, heads, dim]", step.q.rank));
  const std::int64_t batch = step.q.shape[0], next_n = step.q.shape[1];
  if (auto error = check_range("next_n", next_n, std::int64_t{1}, kMostDraftTokens)) return tl::unexpected(*error);
  const TensorView& lens = step.context_lens;
  if (lens.rank != 2 || lens.shape[0] != batch || lens.shape[1] != next_n) {
    return wrong(fmt::format("context_lens has {} dimensions of {} and {}; it must be [{}, {}]", lens.rank,
                             lens.shape[0], lens.shape[1], batch, next_n));
  }
  if (step.block_table.rank != 2 || step.block_table.shape[0] != batch) {
    return wrong(fmt::format("block_table has {} dimensions and {} rows; it must be [{}, max_blocks]",
                             step.block_table.rank, step.block_table.shape[0], batch));
  }
  if (batch > 1 && next_n > 1 && step.q.stride[0] != next_n * step.q.stride[1]) {
    return wrong(fmt::format("q has stride {} between requests; it must be next_n times that between draft tokens, {}",
                             step.q.stride[0], next_n * step.q.stride[1]));
  }
  Problem problem;
  problem.q = step.q;
  problem.q.rank = 3;
  problem.q.shape = {batch * next_n, step.q.shape[2], step.q.shape[3]};
  problem.q.stride = {next_n == 1 ? step.q.stride[0] : step.q.stride[1], step.q.stride[2], step.q.stride[3]};
  problem.w = step.w;
  problem.kv_cache = step.kv_cache;
  problem.block_table = step.block_table;
  problem.ke = step.context_lens;
  problem.topk = step.topk;
  return problem;
}

}  // namespace dosa
