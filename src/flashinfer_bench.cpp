#include "dosa/flashinfer_bench.hpp"

#include "base/check.hpp"
#include "base/error.hpp"
#include "dosa/decode.hpp"
#include "dosa/indexer.hpp"

namespace dosa {
namespace {

constexpr std::int64_t kHeads = 64, kDim = 128, kPageSize = 64;
constexpr std::int32_t kTopk = 2048;

}  // namespace

Result<void> dsa_topk_indexer_fp8_h64_d128_topk2048_ps64(const TensorView& q_index_fp8,
                                                         const TensorView& k_index_cache_fp8, const TensorView& weights,
                                                         const TensorView& seq_lens, const TensorView& block_table,
                                                         const MutableTensorView& topk_indices) {
  const std::int64_t batch = q_index_fp8.shape[0];
  if (auto error = check_tensor("q_index_fp8", q_index_fp8, DType::f8_e4m3, Device::cpu, {batch, kHeads, kDim})) {
    return tl::unexpected(*error);
  }
  if (auto error = check_page_pool("k_index_cache_fp8", k_index_cache_fp8, Device::cpu, kPageSize, kDim)) {
    return tl::unexpected(*error);
  }
  if (auto error = check_tensor("seq_lens", seq_lens, DType::i32, Device::cpu, {batch})) return tl::unexpected(*error);
  DecodeStep step{.q = q_index_fp8,
                  .w = weights,
                  .kv_cache = k_index_cache_fp8,
                  .block_table = block_table,
                  .context_lens = seq_lens,
                  .topk = kTopk};
  step.q.rank = 4;
  step.q.shape = {batch, 1, kHeads, kDim};
  step.q.stride = {q_index_fp8.stride[0], 0, q_index_fp8.stride[1], q_index_fp8.stride[2]};
  step.context_lens.rank = 2;
  step.context_lens.shape = {batch, 1};
  const auto problem = decode_problem(step);
  if (!problem) return tl::unexpected(problem.error());
  Options options;
  options.index_space = IndexSpace::slot;
  auto indexer = Indexer::create(options);
  if (!indexer) return tl::unexpected(indexer.error());
  const auto plan = indexer->plan(shape_of(*problem));
  if (!plan) return tl::unexpected(plan.error());
  const auto stats = indexer->run(*plan, *problem, {topk_indices, {}});
  if (!stats) return tl::unexpected(stats.error());
  return {};
}

}  // namespace dosa
