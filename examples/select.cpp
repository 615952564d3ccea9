// Selects the best 4 of 1000 keys for one query, and prints them.
#include <cstdint>
#include <dosa/indexer.hpp>
#include <iostream>
#include <vector>

int main() {
  constexpr std::int64_t keys = 1000, heads = 2, dim = 32, topk = 4;
  // Head 0 looks at component 0, head 1 (of negative weight) at component 1. 0x38 is 1.0 in E4M3.
  std::vector<std::uint8_t> q(heads * dim), k(keys * dim);
  const std::vector<float> w = {1.0F, -0.5F};
  std::vector<float> k_scale(keys);
  q[0] = q[dim + 1] = 0x38;
  for (std::int64_t i = 0; i < keys; ++i) {
    k[static_cast<std::size_t>(i * dim)] = 0x38;
    k_scale[static_cast<std::size_t>(i)] = static_cast<float>(i * 37 % keys);
  }

  dosa::Problem problem;
  problem.q = dosa::dense_view<const void>(q.data(), dosa::DType::f8_e4m3, {1, heads, dim});
  problem.k = dosa::dense_view<const void>(k.data(), dosa::DType::f8_e4m3, {keys, dim});
  problem.k_scale = dosa::dense_view<const void>(k_scale.data(), dosa::DType::f32, {keys});
  problem.w = dosa::dense_view<const void>(w.data(), dosa::DType::f32, {1, heads});
  problem.topk = topk;

  std::int32_t ids[topk];
  float scores[topk];
  const dosa::Selection out{dosa::dense_view<void>(ids, dosa::DType::i32, {1, topk}),
                            dosa::dense_view<void>(scores, dosa::DType::f32, {1, topk})};

  auto indexer = dosa::Indexer::create();
  if (!indexer) return std::cerr << indexer.error().message << '\n', 1;
  auto plan = indexer->plan(dosa::shape_of(problem));
  if (!plan) return std::cerr << plan.error().message << '\n', 1;
  auto stats = indexer->run(*plan, problem, out);
  if (!stats) return std::cerr << stats.error().message << '\n', 1;

  for (int slot = 0; slot < topk; ++slot) std::cout << ids[slot] << ' ' << scores[slot] << '\n';
}
