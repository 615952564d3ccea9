#include "support/paged.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace dosa::test {

PagedProblem::PagedProblem(std::span<const Problem> requests, std::uint64_t seed, const PageLayout& layout)
    : layout_(layout) {
  const Problem& first = requests.front();
  const std::int64_t heads = first.q.shape[1], dim = first.q.shape[2];
  std::int64_t pages = layout.extra_pages;
  const auto pages_of = [&](const Problem& p) { return (p.k.shape[0] + layout.page_size - 1) / layout.page_size; };
  for (const Problem& request : requests) {
    pages += pages_of(request);
    columns_ = std::max(columns_, pages_of(request));
  }
  columns_ += layout.extra_columns;

  Random random(seed);
  std::vector<std::int32_t> free(static_cast<std::size_t>(pages));
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), random);
  const std::int64_t page_bytes = layout.page_size * (dim + 4);
  const std::int64_t stride = page_bytes + layout.gap;
  pool_.assign(static_cast<std::size_t>(pages * stride), 0x7F);
  constexpr std::int32_t nonsense[] = {-1, std::numeric_limits<std::int32_t>::max(),
                                       std::numeric_limits<std::int32_t>::min(), -7};
  table_.resize(requests.size() * static_cast<std::size_t>(columns_));
  for (std::size_t n = 0; n < table_.size(); ++n) table_[n] = nonsense[n % std::size(nonsense)];

  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Problem& request = requests[r];
    for (std::int64_t key = 0; key < request.k.shape[0]; ++key) {
      std::int32_t& page =
          table_[r * static_cast<std::size_t>(columns_) + static_cast<std::size_t>(key / layout.page_size)];
      if (key % layout.page_size == 0) {
        page = free.back();
        free.pop_back();
      }
      std::uint8_t* bytes = pool_.data() + page * stride;
      const std::int64_t offset = key % layout.page_size;
      for (std::int64_t d = 0; d < dim; ++d) bytes[offset * dim + d] = *request.k.at<std::uint8_t>(key, d);
      std::memcpy(bytes + layout.page_size * dim + offset * 4, request.k_scale.at<float>(key), 4);
    }
    append_rows(request, static_cast<std::int32_t>(r));
  }

  const auto nq = static_cast<std::int64_t>(owners_.size());
  problem_.q = dense_view<const void>(q_.data(), DType::f8_e4m3, {nq, heads, dim});
  problem_.w = dense_view<const void>(w_.data(), DType::f32, {nq, heads});
  problem_.ks = dense_view<const void>(ks_.data(), DType::i32, {nq});
  problem_.ke = dense_view<const void>(ke_.data(), DType::i32, {nq});
  problem_.kv_cache = dense_view<const void>(pool_.data(), DType::f8_e4m3, {pages, layout.page_size, 1, dim + 4});
  problem_.kv_cache.stride[0] = stride;
  problem_.block_table =
      dense_view<const void>(table_.data(), DType::i32, {static_cast<std::int64_t>(requests.size()), columns_});
  problem_.requests = dense_view<const void>(owners_.data(), DType::i32, {nq});
  problem_.topk = first.topk;
  if (requests.size() == 1 && first.hints.present()) problem_.hints = first.hints;
}

void PagedProblem::append_rows(const Problem& request, std::int32_t index) {
  for (std::int64_t row = 0; row < request.q.shape[0]; ++row) {
    owners_.push_back(index);
    for (std::int64_t h = 0; h < request.q.shape[1]; ++h) {
      w_.push_back(*request.w.at<float>(row, h));
      for (std::int64_t d = 0; d < request.q.shape[2]; ++d) q_.push_back(*request.q.at<std::uint8_t>(row, h, d));
    }
    // There may be room for more keys than the request has.
    const auto nk = static_cast<std::int32_t>(request.k.shape[0]);
    ks_.push_back(request.ks.present() ? *request.ks.at<std::int32_t>(row) : 0);
    ke_.push_back(request.ke.present() ? std::min(*request.ke.at<std::int32_t>(row), nk) : nk);
  }
}

std::int32_t PagedProblem::slot_of(std::int64_t request, std::int64_t key) const {
  const std::int32_t page = table_[static_cast<std::size_t>(request * columns_ + key / layout_.page_size)];
  return page * static_cast<std::int32_t>(layout_.page_size) + static_cast<std::int32_t>(key % layout_.page_size);
}

}  // namespace dosa::test
