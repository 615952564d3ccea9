#include "support/cases.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "score/quantize.hpp"

namespace dosa::test {
namespace {

constexpr std::uint8_t kOne = 0x38;  // 1.0 in E4M3

template <typename T>
TensorView view_of(const std::vector<T>& array, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view{array.data(), dtype, Device::cpu, static_cast<int>(shape.size()), {}, {}};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (auto axis = static_cast<std::size_t>(view.rank); axis-- > 0;) {
    view.stride[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}

std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

}  // namespace

Problem Case::problem() const {
  Problem p;
  p.q = view_of(q, DType::f8_e4m3, {nq, heads, dim});
  p.k = view_of(k, DType::f8_e4m3, {nk, dim});
  p.k_scale = view_of(k_scale, DType::f32, {nk});
  p.w = view_of(w, DType::f32, {nq, heads});
  if (!ks.empty()) p.ks = view_of(ks, DType::i32, {nq});
  if (!ke.empty()) p.ke = view_of(ke, DType::i32, {nq});
  if (!hints.empty()) {
    p.hints = view_of(hints, DType::i32, {hint_rows, static_cast<std::int64_t>(hints.size()) / hint_rows});
  }
  p.topk = topk;
  return p;
}

Case explicit_scores(const std::vector<float>& scores, std::int32_t topk, std::int64_t nq, std::int32_t heads,
                     std::int32_t dim) {
  Case c;
  c.nq = nq;
  c.nk = static_cast<std::int64_t>(scores.size());
  c.heads = heads;
  c.dim = dim;
  c.topk = topk;
  const auto width = static_cast<std::size_t>(dim);
  const auto rows = static_cast<std::size_t>(nq);
  const auto row_heads = static_cast<std::size_t>(heads);
  c.q.assign(rows * row_heads * width, 0);
  c.w.assign(rows * row_heads, 0.0F);
  for (std::size_t j = 0; j < rows; ++j) {
    for (std::size_t h = 0; h < std::min<std::size_t>(row_heads, 2); ++h) {
      c.q[(j * row_heads + h) * width + h] = kOne;
      c.w[j * row_heads + h] = h == 0 ? 1.0F : -1.0F;
    }
  }
  c.k.assign(scores.size() * width, 0);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    c.k[i * width + (std::signbit(scores[i]) ? 1 : 0)] = kOne;
    c.k_scale.push_back(std::fabs(scores[i]));
  }
  return c;
}

Case random_case(std::uint64_t seed, std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim,
                 std::int32_t topk, const Family& family) {
  Random random(seed);
  std::normal_distribution<float> normal;
  Case c;
  c.nq = nq;
  c.nk = nk;
  c.heads = heads;
  c.dim = dim;
  c.topk = topk;
  std::vector<float> shared(static_cast<std::size_t>(dim));
  for (float& x : shared) x = normal(random);
  const auto append_row = [&](std::vector<std::uint8_t>& bytes, double share, float size) {
    const auto common = static_cast<float>(share);
    const auto own = static_cast<float>(std::sqrt(1 - share * share));
    for (const float x : shared) bytes.push_back(encode_e4m3(size * (common * x + own * normal(random))));
  };
  for (std::int64_t j = 0; j < nq; ++j) {
    for (std::int32_t h = 0; h < heads; ++h) {
      append_row(c.q, family.correlation, 4.0F);
      const bool positive = h < static_cast<std::int32_t>(std::lround(family.positive * heads));
      const float size = std::exp(normal(random)) / static_cast<float>(heads);
      c.w.push_back(positive ? size : -size);
    }
  }
  for (std::int64_t i = 0; i < nk; ++i) {
    append_row(c.k, family.alignment * std::sin(static_cast<double>(i)), 64.0F);
    c.k_scale.push_back(std::exp(static_cast<float>(family.scale_spread) * normal(random)) / 64.0F);
  }
  return c;
}

void make_causal(Case& c) {
  c.ks.clear();
  c.ke.clear();
  for (std::int64_t j = 0; j < c.nq; ++j) c.ke.push_back(static_cast<std::int32_t>(c.nk - c.nq + j + 1));
}

void make_ragged(Case& c, std::uint64_t seed) {
  Random random(seed);
  c.ks.clear();
  c.ke.clear();
  for (std::int64_t j = 0; j < c.nq; ++j) {
    std::int64_t begin = uniform(random, 0, c.nk);
    std::int64_t end = uniform(random, begin, c.nk);
    switch (uniform(random, 0, 7)) {
      case 0: begin = -uniform(random, 1, 1000); break;
      case 1: end = c.nk + uniform(random, 1, 1000); break;
      case 2: std::swap(begin, end); break;
      case 3: end = begin; break;
      case 4: begin = std::numeric_limits<std::int32_t>::min(); break;
      case 5: end = std::numeric_limits<std::int32_t>::max(); break;
      default: break;
    }
    c.ks.push_back(static_cast<std::int32_t>(begin));
    c.ke.push_back(static_cast<std::int32_t>(end));
  }
}

StridedCase::StridedCase(const Case& c, std::uint64_t seed) : random_(seed) {
  constexpr std::uint8_t nan_byte = 0x7F;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::int32_t far = 0x7FFFFFFF;
  problem_.q = scatter(c.q, {c.nq, c.heads, c.dim}, DType::f8_e4m3, nan_byte);
  problem_.k = scatter(c.k, {c.nk, c.dim}, DType::f8_e4m3, nan_byte);
  problem_.k_scale = scatter(c.k_scale, {c.nk}, DType::f32, nan);
  problem_.w = scatter(c.w, {c.nq, c.heads}, DType::f32, nan);
  if (!c.ks.empty()) problem_.ks = scatter(c.ks, {c.nq}, DType::i32, far);
  if (!c.ke.empty()) problem_.ke = scatter(c.ke, {c.nq}, DType::i32, far);
  if (!c.hints.empty()) {
    const std::int64_t width = static_cast<std::int64_t>(c.hints.size()) / c.hint_rows;
    problem_.hints = scatter(c.hints, {c.hint_rows, width}, DType::i32, far);
  }
  problem_.topk = c.topk;
}

template <typename T>
TensorView StridedCase::scatter(const std::vector<T>& dense, std::vector<std::int64_t> shape, DType dtype, T poison) {
  const std::size_t rank = shape.size();
  TensorView view{nullptr, dtype, Device::cpu, static_cast<int>(rank), {}, {}};
  std::copy(shape.begin(), shape.end(), view.shape.begin());

  // Axes are laid out in random order, each with a gap after its extent.
  std::vector<std::size_t> axes(rank);
  std::iota(axes.begin(), axes.end(), std::size_t{0});
  if (uniform(random_, 0, 1) == 1) std::shuffle(axes.begin(), axes.end(), random_);
  std::int64_t extent = uniform(random_, 1, 3);
  for (std::size_t n = rank; n-- > 0;) {
    view.stride[axes[n]] = extent;
    extent *= std::max<std::int64_t>(shape[axes[n]], 1);
    extent += uniform(random_, 0, 5);
  }
  const std::int64_t offset = uniform(random_, 0, 9);
  const auto array = std::make_shared<std::vector<T>>(static_cast<std::size_t>(extent + offset + 8), poison);
  arrays_.push_back(array);
  T* origin = array->data() + offset;
  for (std::size_t axis = 0; axis < rank; ++axis) {  // some axes run backwards
    if (shape[axis] == 0 || uniform(random_, 0, 3) != 0) continue;
    origin += (shape[axis] - 1) * view.stride[axis];
    view.stride[axis] = -view.stride[axis];
  }
  view.data = origin;

  for (std::size_t n = 0; n < dense.size(); ++n) {
    std::int64_t at = 0;
    auto rest = static_cast<std::int64_t>(n);
    for (std::size_t axis = rank; axis-- > 0;) {
      at += rest % shape[axis] * view.stride[axis];
      rest /= shape[axis];
    }
    origin[at] = dense[n];
  }
  return view;
}

}  // namespace dosa::test
