#include "certificate/heads.hpp"

#include <algorithm>
#include <cmath>

#include "base/numeric.hpp"

namespace dosa {
namespace {

constexpr int kMaxFocus = 256;  // focus keys used; more would only slow the statistics down
constexpr int kLanes = 16;      // independent sums, so that compilers may keep them in vectors

struct Focus {
  std::array<std::int32_t, kMaxFocus> key{};
  int count = 0;

  explicit Focus(const PanelDots& panel) {
    if (panel.x == nullptr || panel.focus.empty()) return;
    const std::size_t step = (panel.focus.size() + kMaxFocus - 1) / kMaxFocus;
    for (std::size_t i = 0; i < panel.focus.size(); i += step) key[count++] = panel.focus[i];
  }
};

// Dots of one head with the focus keys, zero in the padding; a NaN dot counts as 0.
using FocusRow = std::array<float, kMaxFocus>;

int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

void gather(const PanelDots& panel, const Focus& focus, int head, float factor, FocusRow& row) {
  const float* x = panel.x + static_cast<std::ptrdiff_t>(head) * panel.stride;
  for (int i = 0; i < focus.count; ++i) {
    const float value = x[focus.key[i]];
    row[i] = value == value ? factor * value : 0.0F;
  }
  std::fill(row.begin() + focus.count, row.begin() + padded(focus.count), 0.0F);
}

template <typename Term>
float lane_sum(int count, Term term) {
  std::array<float, kLanes> sum{};
  for (int i = 0; i < count; i += kLanes) {
    for (int e = 0; e < kLanes; ++e) sum[e] += term(i + e);
  }
  float total = 0;
  for (const float s : sum) total += s;
  return total;
}

bool is_active(const QueryHeads& query, int h) {
  return query.w[h] != 0.0F && query.gram[static_cast<std::size_t>(h) * query.heads + h] != 0.0F;
}

// Backward elimination. State: the kept heads, the omitted positive heads p with their anchors, and
//
//   z[l][p] = w_p (q_p - beta_p q_anchor(p)) . q_l,
//
// so that u_p . v for any v = q_l - beta q_j takes one pass over contiguous memory. f32: a ranking needs no more.
class Elimination {
 public:
  Elimination(const QueryHeads& query, const HeadRanking& statistics, float key_norm)
      : query_(query), key_norm_(key_norm) {
    double total = 0;
    for (int h = 0; h < query.heads; ++h) {
      const double norm = std::sqrt(static_cast<double>(gram(h, h)));
      if (is_active(query, h)) total += std::abs(static_cast<double>(query.w[h])) * norm;
    }
    for (int h = 0; h < query.heads; ++h) {
      if (!is_active(query, h)) continue;
      kept_[kept_count_++] = static_cast<std::int16_t>(h);
      inverse_norm_[h] = 1.0F / std::sqrt(gram(h, h));
      weight_[h] = static_cast<float>(query.w[h] / total);  // no overflow whatever the scale of the weights
      magnitude_[h] = statistics.on[h] + statistics.off[h];
      lesser_[h] = std::min(statistics.on[h], statistics.off[h]);
    }
    for (int i = 0; i < kept_count_; ++i) {
      if (weight_[kept_[i]] > 0) find_anchors(kept_[i]);
    }
  }

  void run(HeadRanking& out) {
    out.count = kept_count_;
    while (kept_count_ > 0) {
      const float root = std::sqrt(residual_);
      int best = 0;
      float least = 0;
      for (int i = 0; i < kept_count_; ++i) {
        const int h = kept_[i];
        if (!known_[h]) find_loss(h);
        const float value = linear_[h] + 0.5F * key_norm_ * (std::sqrt(std::max(residual_ + square_[h], 0.0F)) - root);
        if (i == 0 || value < least) {
          least = value;
          best = i;
        }
      }
      out.order[kept_count_ - 1] = kept_[best];
      give_up(best);
    }
  }

 private:
  struct Anchor {
    int head;    // -1: none
    float beta;  // q_h . q_j / ||q_j||^2
  };

  [[nodiscard]] float gram(int h, int l) const { return query_.gram[static_cast<std::size_t>(h) * query_.heads + l]; }

  [[nodiscard]] Anchor anchor_of(int h, int j) const {
    return j < 0 ? Anchor{-1, 0.0F} : Anchor{j, gram(h, j) / gram(j, j)};
  }

  void find_anchors(int h) {
    float best = 0, second = 0;
    first_[h] = second_[h] = -1;
    for (int i = 0; i < kept_count_; ++i) {
      const int j = kept_[i];
      if (j == h) continue;
      const float share = std::abs(gram(h, j)) * inverse_norm_[j];
      if (share > best) {
        second = best;
        second_[h] = first_[h];
        best = share;
        first_[h] = static_cast<std::int16_t>(j);
      } else if (share > second) {
        second = share;
        second_[h] = static_cast<std::int16_t>(j);
      }
    }
  }

  [[nodiscard]] float triangle(int h, Anchor a) const {
    return a.head < 0 ? 0.0F : 0.5F * weight_[h] * std::abs(a.beta) * magnitude_[a.head];
  }

  // Of the omitted head at p: u_p . w_h (q_h - beta q_j), and the sum of its absolute values over p.
  [[nodiscard]] float product(int p, int h, Anchor a) const {
    return weight_[h] * (z_[h][p] - (a.head < 0 ? 0.0F : a.beta * z_[a.head][p]));
  }
  [[nodiscard]] float coupling(int h, Anchor a) const {
    const float* zh = z_[h].data();
    const float* zj = z_[a.head < 0 ? h : a.head].data();
    const float beta = a.head < 0 ? 0.0F : a.beta;
    return weight_[h] * lane_sum(padded(omitted_count_), [&](int p) { return std::abs(zh[p] - beta * zj[p]); });
  }

  // w_h d_h . w_l d_l from the gram matrix.
  [[nodiscard]] float product(int h, Anchor a, int l, Anchor b) const {
    float d = gram(h, l);
    if (a.head >= 0) d -= a.beta * gram(a.head, l);
    if (b.head >= 0) d -= b.beta * (gram(h, b.head) - (a.head < 0 ? 0.0F : a.beta * gram(a.head, b.head)));
    return weight_[h] * weight_[l] * d;
  }

  // Rise of the mean bound over the focus keys if h is given up, apart from the residual, and rise of E'^2: h itself,
  // and the heads that lean on it and would have to lean on their second choice.
  void find_loss(int h) {
    std::array<std::int16_t, kMaxHeads> mover, place;  // heads whose u changes; place among the omitted, -1 for h
    std::array<Anchor, kMaxHeads> anchor;
    int movers = 0;
    float linear = 0, square = 0;
    for (int p = 0; p < omitted_count_; ++p) {
      const int l = omitted_[p];
      if (first_[l] != h) continue;
      mover[movers] = static_cast<std::int16_t>(l);
      place[movers] = static_cast<std::int16_t>(p);
      anchor[movers++] = anchor_of(l, second_[l]);
      linear -= triangle(l, anchor_of(l, h));
    }
    const int leaning = movers;
    if (weight_[h] > 0) {
      mover[movers] = static_cast<std::int16_t>(h);
      place[movers] = -1;
      anchor[movers++] = anchor_of(h, first_[h]);
      linear -= 0.5F * weight_[h] * magnitude_[h];
    } else {
      linear -= weight_[h] * lesser_[h];
    }
    for (int c = 0; c < movers; ++c) {
      linear += triangle(mover[c], anchor[c]);
      // Pairs with heads that stay, twice; pairs among the movers once for each order.
      float old_inside = 0, to_old = 0, new_inside = 0;
      for (int e = 0; e < movers; ++e) {
        new_inside += std::abs(product(mover[c], anchor[c], mover[e], anchor[e]));
        if (e < leaning) to_old += std::abs(product(place[e], mover[c], anchor[c]));
      }
      square += 2 * (coupling(mover[c], anchor[c]) - to_old) + new_inside;
      if (place[c] < 0) continue;
      for (int e = 0; e < leaning; ++e) old_inside += std::abs(product(place[e], mover[c], anchor_of(mover[c], h)));
      square -= 2 * (row_sum_[place[c]] - old_inside) + old_inside;
    }
    linear_[h] = linear;
    square_[h] = square;
    known_[h] = true;
  }

  void fill_column(int p, int h) {
    const Anchor a = anchor_of(h, first_[h]);
    for (int l = 0; l < query_.heads; ++l) {
      const float d = a.head < 0 ? gram(h, l) : gram(h, l) - a.beta * gram(a.head, l);
      z_[l][p] = weight_[h] * d;
    }
  }

  void give_up(int position) {
    const int h = kept_[position];
    std::copy(kept_.begin() + position + 1, kept_.begin() + kept_count_, kept_.begin() + position);
    --kept_count_;
    for (int i = 0; i < kept_count_; ++i) {
      const int k = kept_[i];
      if (weight_[k] > 0 && (first_[k] == h || second_[k] == h)) {
        known_[k] = known_[k] && first_[k] != h;
        find_anchors(k);
      }
    }
    bool moved = false;
    for (int p = 0; p < omitted_count_; ++p) {
      const int l = omitted_[p];
      const bool leant = first_[l] == h;
      if (!leant && second_[l] != h) continue;
      find_anchors(l);
      if (first_[l] >= 0) known_[first_[l]] = false;
      if (leant) fill_column(p, l);
      moved = moved || leant;
    }
    if (weight_[h] > 0) {
      fill_column(omitted_count_, h);
      omitted_[omitted_count_++] = static_cast<std::int16_t>(h);
    }
    if (moved) {  // every pair may have changed
      residual_ = 0;
      for (int p = 0; p < omitted_count_; ++p) {
        row_sum_[p] = coupling(omitted_[p], anchor_of(omitted_[p], first_[omitted_[p]]));
        residual_ += row_sum_[p];
      }
      known_.fill(false);
      return;
    }
    if (weight_[h] <= 0) return;
    // Only pairs with h are new.
    const int last = omitted_count_ - 1;
    row_sum_[last] = 0;
    for (int p = 0; p <= last; ++p) {
      const float pair = std::abs(product(last, omitted_[p], anchor_of(omitted_[p], first_[omitted_[p]])));
      row_sum_[last] += pair;
      residual_ += pair;
      if (p == last) break;
      row_sum_[p] += pair;
      residual_ += pair;
      if (first_[omitted_[p]] >= 0) known_[first_[omitted_[p]]] = false;
    }
    if (first_[h] >= 0) known_[first_[h]] = false;
    for (int i = 0; i < kept_count_; ++i) {
      const int k = kept_[i];
      if (weight_[k] > 0 && known_[k]) square_[k] += 2 * std::abs(product(last, k, anchor_of(k, first_[k])));
    }
  }

  const QueryHeads& query_;
  float key_norm_;
  int kept_count_ = 0, omitted_count_ = 0;
  std::array<std::int16_t, kMaxHeads> kept_{}, omitted_{}, first_{}, second_{};
  std::array<float, kMaxHeads> inverse_norm_{}, weight_{}, magnitude_{}, lesser_{}, row_sum_{};
  std::array<float, kMaxHeads> linear_{}, square_{};  // of a kept head, where known
  std::array<bool, kMaxHeads> known_{};
  float residual_ = 0;  // E'^2, weights divided by sum |w_h| ||q_h||
  std::array<std::array<float, kMaxHeads>, kMaxHeads> z_{};
};

void rank_by_size(const QueryHeads& query, HeadRanking& out) {
  std::array<double, kMaxHeads> size{};
  for (int h = 0; h < query.heads; ++h) {
    if (!is_active(query, h)) continue;
    out.order[out.count++] = static_cast<std::int16_t>(h);
    const double p = out.on_share[h];
    size[h] = std::abs(static_cast<double>(query.w[h])) *
              std::sqrt(static_cast<double>(query.gram[static_cast<std::size_t>(h) * query.heads + h])) *
              (query.w[h] > 0 ? 1 : std::min(p, 1 - p));
  }
  std::sort(out.order.begin(), out.order.begin() + out.count, [&](int a, int b) {
    if ((query.w[a] > 0) != (query.w[b] > 0)) return query.w[a] > 0;
    return size[a] != size[b] ? size[a] > size[b] : a < b;
  });
}

}  // namespace

HeadRanking rank_heads(const QueryHeads& query, const PanelDots& panel) {
  HeadRanking out;
  out.on_share.fill(0.5F);
  for (int h = 0; h < query.heads; ++h) {  // such a query has no certificate; see find_active in certificate.cpp
    const float square = query.gram[static_cast<std::size_t>(h) * query.heads + h];
    if (!std::isfinite(query.w[h]) || !std::isfinite(square)) return out;
  }
  const Focus focus(panel);
  FocusRow x;
  const float each = 1.0F / static_cast<float>(std::max(focus.count, 1));
  for (int h = 0; focus.count > 0 && h < query.heads; ++h) {
    if (!is_active(query, h)) continue;
    gather(panel, focus, h, 1.0F, x);
    const int count = padded(focus.count);
    out.on_share[h] = each * lane_sum(count, [&](int i) { return x[i] > 0.0F ? 1.0F : 0.0F; });
    out.on[h] = each * lane_sum(count, [&](int i) { return x[i] > 0.0F ? x[i] : 0.0F; });
    out.off[h] = each * lane_sum(count, [&](int i) { return x[i] < 0.0F ? -x[i] : 0.0F; });
  }
  float key_norm = 0;
  if (!panel.rho.empty()) {
    for (int i = 0; i < focus.count; ++i) {
      const float rho = panel.rho[static_cast<std::size_t>(focus.key[i])];
      key_norm += std::isfinite(rho) ? rho * each : 0.0F;
    }
    key_norm *= std::sqrt(static_cast<float>(query.dim));
  }
  if (key_norm > 0)
    Elimination(query, out, key_norm).run(out);
  else
    rank_by_size(query, out);
  return out;
}

HeadGroups group_for_linear(const HeadRanking& ranking, std::span<const std::int16_t> negative) {
  HeadGroups group;
  group.fill(-1);
  for (const int h : negative) group[h] = ranking.on[h] > ranking.off[h] ? 0 : -1;
  return group;
}

HeadGroups group_for_relu(const QueryHeads& query, const HeadRanking& ranking, const PanelDots& panel,
                          std::span<const std::int16_t> negative, int aggregates) {
  HeadGroups group;
  group.fill(-1);
  if (aggregates < 1) return group;
  const Focus focus(panel);
  if (aggregates == 1 || focus.count == 0) {
    for (const int h : negative) group[h] = ranking.on_share[h] >= 0.5F ? 0 : -1;
    return group;
  }
  std::array<std::int16_t, kMaxHeads> order;
  std::copy(negative.begin(), negative.end(), order.begin());
  const auto size = [&](int h) { return -query.w[h] * ranking.on[h]; };
  std::sort(order.begin(), order.begin() + negative.size(), [&](int a, int b) {
    const float sa = size(a), sb = size(b);
    return sa != sb ? sa > sb : a < b;
  });
  std::array<FocusRow, kMaxAggregates> sum{};
  FocusRow term;
  const int count = padded(focus.count);
  for (std::size_t i = 0; i < negative.size(); ++i) {
    const int h = order[i];
    gather(panel, focus, h, -query.w[h], term);
    float best = 0;
    int chosen = -1;
    for (int g = 0; g < aggregates; ++g) {
      const FocusRow& s = sum[g];
      const float rise = lane_sum(count, [&](int f) { return relu(s[f] + term[f]) - relu(s[f]); });
      if (rise > best) {
        best = rise;
        chosen = g;
      }
    }
    group[h] = static_cast<std::int8_t>(chosen);
    if (chosen < 0) continue;
    for (int f = 0; f < count; ++f) sum[chosen][f] += term[f];
  }
  return group;
}

}  // namespace dosa
