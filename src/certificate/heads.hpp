// One query's heads as the certificate sees them, and which of them are worth a bound row.
//
// Everything decided here is advice: the inequality holds for any retained set and any groups.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace dosa {

inline constexpr int kMaxHeads = 128;
inline constexpr int kMaxDim = 128;
inline constexpr int kMaxAggregates = 4;

/// One query's indexer data, decoded. `q` holds exact E4M3 values.
struct QueryHeads {
  int heads = 0;
  int dim = 0;
  std::span<const float> q;     // [heads, dim]
  std::span<const float> w;     // [heads], signed
  std::span<const float> gram;  // [heads, heads], q_h . q_l; NaN on the diagonal of a head that has a NaN byte
  double gram_error = 0;  // |gram_hl - exact| <= gram_error * ||q_h|| ||q_l||; 0 if exact, gamma(dim) from an f32 chain
};

/// Raw dots of the heads with sampled keys: what statistics and predicted survivors are taken from.
struct PanelDots {
  int keys = 0;
  int stride = 0;                       // floats between heads, >= keys
  const float* x = nullptr;             // [heads, stride], x_h(i)
  std::span<const std::int32_t> focus;  // panel keys that score near tau; statistics come from these
  std::span<const float> rho;           // [keys], key norms as in Certificate; empty: heads are ranked without them
};

/// The heads of a query from the most to the least worth keeping, and what the focus keys say of each.
/// May be made for one query and used for its neighbours.
struct HeadRanking {
  int count = 0;
  std::array<std::int16_t, kMaxHeads> order{};
  std::array<float, kMaxHeads> on_share{};  // share of focus keys with x_h > 0
  std::array<float, kMaxHeads> on{};        // mean of [x_h]+ over them
  std::array<float, kMaxHeads> off{};       // mean of [-x_h]+
};

/// Ranks by elimination: again and again the head is given up whose loss raises the mean of the extended form over the
/// focus keys least. So the first r heads of the one order serve every row budget. Without focus keys or norms:
/// positive heads by w_h ||q_h||, then negative ones by |w_h| ||q_h|| min(p_h, 1 - p_h). Cost: some 30 us for 32 heads,
/// 55 us for 64 with half of them positive, 170 us where nearly all are.
HeadRanking rank_heads(const QueryHeads& query, const PanelDots& panel);

/// Group of each omitted negative head, -1: none.
using HeadGroups = std::array<std::int8_t, kMaxHeads>;

/// For a linear form: group 0 are the heads whose mean dot over the focus keys is positive.
HeadGroups group_for_linear(const HeadRanking& ranking, std::span<const std::int16_t> negative);

/// Groups for relu aggregates. One group: the heads with p_h >= 1/2. More: greedily by co-activation, each head joining
/// the group whose mean [sum]+ over the focus keys it raises most.
HeadGroups group_for_relu(const QueryHeads& query, const HeadRanking& ranking, const PanelDots& panel,
                          std::span<const std::int16_t> negative, int aggregates);

}  // namespace dosa
