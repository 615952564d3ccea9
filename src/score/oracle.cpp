#include "score/oracle.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/dtype.hpp"
#include "base/keys.hpp"
#include "base/numeric.hpp"

namespace dosa {

OracleRow oracle_row(const Problem& problem, std::int64_t row, ReferenceScorer scorer, Order order, IndexSpace space) {
  const std::int64_t heads = problem.q.shape[1];
  const std::int64_t dim = problem.q.shape[2];
  const auto topk = static_cast<std::size_t>(problem.topk);

  std::vector<std::uint8_t> q;
  std::vector<float> w;
  for (std::int64_t h = 0; h < heads; ++h) {
    w.push_back(*problem.w.at<float>(row, h));
    for (std::int64_t d = 0; d < dim; ++d) q.push_back(*problem.q.at<std::uint8_t>(row, h, d));
  }
  const VisibleRange visible = visible_range(problem, row);
  const KeyRows keys(problem, request_of(problem, row));

  // Sorted as one integer: the better score first, then the lower id.
  struct Record {
    std::uint64_t rank;
    float score;
  };
  std::vector<Record> records;
  const QueryScorer score(scorer, q, w);
  std::vector<std::uint8_t> k(static_cast<std::size_t>(dim));
  for (std::int64_t i = visible.begin; i < visible.end; ++i) {
    keys.copy(i, k);
    const float s = score(k, keys.scale(i));
    records.push_back({static_cast<std::uint64_t>(order_code(s)) << 32 | static_cast<std::uint64_t>(i), s});
  }
  std::sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.rank < b.rank; });
  if (records.size() > topk) records.resize(topk);

  const auto id_of = [](const Record& record) { return static_cast<std::int32_t>(record.rank & 0xFFFFFFFFU); };
  if (order == Order::ascending) {
    std::sort(records.begin(), records.end(), [&](const Record& a, const Record& b) { return id_of(a) < id_of(b); });
  }

  OracleRow result{std::vector<std::int32_t>(topk, -1),
                   std::vector<float>(topk, -std::numeric_limits<float>::infinity())};
  for (std::size_t n = 0; n < records.size(); ++n) {
    result.ids[n] = keys.id_of(id_of(records[n]), space, visible.begin);
    result.scores[n] = std::isnan(records[n].score) ? std::bit_cast<float>(0x7FC00000U) : records[n].score;
  }
  return result;
}

std::int64_t exact_dot(const std::uint8_t* a, const std::uint8_t* b, int dim) {
  // Every E4M3 value is an integer in units of 2^-9.
  const auto units = [](std::uint8_t byte) { return static_cast<std::int64_t>(kE4m3Table[byte] * 512.0F); };
  std::int64_t sum = 0;
  for (int d = 0; d < dim; ++d) sum += units(a[d]) * units(b[d]);
  return sum;
}

}  // namespace dosa
