#include "io/synth.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/keys.hpp"
#include "score/quantize.hpp"

namespace dosa {
namespace {

constexpr std::uint8_t kOneByte = 0x38;  // 1.0 in E4M3
static_assert(decode_e4m3(kOneByte) == 1.0F);

class Gaussian {
 public:
  explicit Gaussian(std::uint64_t seed) : engine_(seed) {}
  float operator()() { return normal_(engine_); }
  std::uint64_t below(std::uint64_t n) { return std::uniform_int_distribution<std::uint64_t>(0, n - 1)(engine_); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

std::span<std::uint8_t> row_of(std::vector<std::uint8_t>& bytes, std::int64_t row, std::int32_t dim) {
  return std::span(bytes).subspan(static_cast<std::size_t>(row * dim), static_cast<std::size_t>(dim));
}

std::int32_t saturated(std::int64_t value) {
  using Limits = std::numeric_limits<std::int32_t>;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(value, Limits::min(), Limits::max()));
}

}  // namespace

Activations Activations::zeros(std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim) {
  Activations a;
  a.nq = nq;
  a.nk = nk;
  a.heads = heads;
  a.dim = dim;
  a.q.resize(static_cast<std::size_t>(nq * heads * dim));
  a.k.resize(static_cast<std::size_t>(nk * dim));
  a.k_scale.resize(static_cast<std::size_t>(nk));
  a.w.resize(static_cast<std::size_t>(nq * heads));
  a.ks.assign(static_cast<std::size_t>(nq), 0);
  a.ke.assign(static_cast<std::size_t>(nq), saturated(nk));
  return a;
}

Problem Activations::problem() const {
  Problem p;
  p.q = dense_view<const void>(q.data(), DType::f8_e4m3, {nq, heads, dim});
  p.k = dense_view<const void>(k.data(), DType::f8_e4m3, {nk, dim});
  p.k_scale = dense_view<const void>(k_scale.data(), DType::f32, {nk});
  p.w = dense_view<const void>(w.data(), DType::f32, {nq, heads});
  p.ks = dense_view<const void>(ks.data(), DType::i32, {nq});
  p.ke = dense_view<const void>(ke.data(), DType::i32, {nq});
  return p;
}

Activations with_scores(std::span<const float> scores, std::int64_t nq, std::int32_t heads, std::int32_t dim) {
  Activations a = Activations::zeros(nq, static_cast<std::int64_t>(scores.size()), heads, dim);
  for (std::int64_t j = 0; j < nq; ++j) {
    for (std::int32_t h = 0; h < std::min(heads, 2); ++h) {
      row_of(a.q, j * heads + h, dim)[static_cast<std::size_t>(h)] = kOneByte;
      a.w[static_cast<std::size_t>(j * heads + h)] = h == 0 ? 1.0F : -1.0F;
    }
  }
  for (std::size_t i = 0; i < scores.size(); ++i) {
    row_of(a.k, static_cast<std::int64_t>(i), dim)[std::signbit(scores[i]) ? 1 : 0] = kOneByte;
    a.k_scale[i] = std::fabs(scores[i]);
  }
  return a;
}

Activations random_activations(std::int64_t nq, std::int64_t nk, std::int32_t heads, std::int32_t dim,
                               const RandomFamily& family, std::uint64_t seed) {
  Activations a = Activations::zeros(nq, nk, heads, dim);
  Gaussian gaussian(seed);
  const auto common = static_cast<float>(family.correlation);
  const auto own = static_cast<float>(std::sqrt(1 - family.correlation * family.correlation));
  std::vector<float> direction(static_cast<std::size_t>(dim));
  std::ranges::generate(direction, std::ref(gaussian));
  std::vector<float> row(direction.size());
  const auto fill_row = [&](float strength) {
    std::ranges::transform(direction, row.begin(), [&](float x) { return common * strength * x + own * gaussian(); });
  };

  const auto positive = static_cast<std::int32_t>(std::lround(family.positive * heads));
  const float size = 1.0F / std::sqrt(static_cast<float>(heads) * static_cast<float>(dim));
  for (std::int64_t j = 0; j < nq; ++j) {
    for (std::int32_t h = 0; h < heads; ++h) {
      fill_row(1);
      const float scale = quantize_row(row, row_of(a.q, j * heads + h, dim), ScaleRule::amax);
      const float weight = std::fabs(gaussian()) * scale * size;
      a.w[static_cast<std::size_t>(j * heads + h)] = h < positive ? weight : -weight;
    }
    a.ke[static_cast<std::size_t>(j)] = saturated(nk - nq + j + 1);
  }
  for (std::int64_t i = 0; i < nk; ++i) {
    fill_row(gaussian());  // keys differ in how far they lie along the direction, so that some score much higher
    a.k_scale[static_cast<std::size_t>(i)] = quantize_row(row, row_of(a.k, i, dim), ScaleRule::amax);
  }
  return a;
}

Activations extended(const Problem& problem, std::int64_t nk, double jitter, std::uint64_t seed) {
  const std::int64_t old = problem.k.shape[0];
  const std::int64_t added = nk - old;
  Activations a = Activations::zeros(problem.q.shape[0], nk, static_cast<std::int32_t>(problem.q.shape[1]),
                                     static_cast<std::int32_t>(problem.q.shape[2]));
  std::copy_n(problem.q.at<std::uint8_t>(), a.q.size(), a.q.begin());
  std::copy_n(problem.w.at<float>(), a.w.size(), a.w.begin());
  std::copy_n(problem.k.at<std::uint8_t>(), old * a.dim, a.k.begin() + added * a.dim);
  std::copy_n(problem.k_scale.at<float>(), old, a.k_scale.begin() + added);
  for (std::int64_t j = 0; j < a.nq; ++j) {
    const auto row = static_cast<std::size_t>(j);
    if (problem.ks.present()) a.ks[row] = *problem.ks.at<std::int32_t>(j);
    if (problem.ke.present()) a.ke[row] = saturated(std::int64_t{*problem.ke.at<std::int32_t>(j)} + added);
  }

  Gaussian gaussian(seed);
  for (std::int64_t i = 0; i < added; ++i) {
    const auto source = static_cast<std::int64_t>(gaussian.below(static_cast<std::uint64_t>(old)));
    const std::span from(problem.k.at<std::uint8_t>(source), static_cast<std::size_t>(a.dim));
    double squares = 0;
    for (const std::uint8_t byte : from) squares += std::pow(static_cast<double>(kE4m3Table[byte]), 2);
    const auto noise = static_cast<float>(jitter * std::sqrt(squares / a.dim));
    std::ranges::transform(from, row_of(a.k, i, a.dim).begin(),
                           [&](std::uint8_t byte) { return encode_e4m3(kE4m3Table[byte] + noise * gaussian()); });
    a.k_scale[static_cast<std::size_t>(i)] = *problem.k_scale.at<float>(source);
  }
  return a;
}

DecodeTensors DecodeStream::tensors() const {
  const std::int64_t pages = static_cast<std::int64_t>(kv_cache.size()) / (page_size * (dim + 4));
  const std::int64_t blocks = static_cast<std::int64_t>(block_table.size()) / requests;
  return {.q = dense_view<const void>(q.data(), DType::f8_e4m3, {steps, requests, next_n, heads, dim}),
          .w = dense_view<const void>(w.data(), DType::f32, {steps, requests, next_n, heads}),
          .kv_cache = dense_view<const void>(kv_cache.data(), DType::f8_e4m3, {pages, page_size, 1, dim + 4}),
          .block_table = dense_view<const void>(block_table.data(), DType::i32, {requests, blocks}),
          .context_lens = dense_view<const void>(context_lens.data(), DType::i32, {steps, requests, next_n})};
}

Result<DecodeStream> as_decode_stream(const Problem& problem, const StreamShape& shape, std::uint64_t seed) {
  const std::int64_t nq = problem.q.shape[0], nk = problem.k.shape[0];
  DecodeStream s;
  s.requests = shape.requests;
  s.next_n = shape.next_n;
  s.page_size = shape.page_size;
  s.heads = static_cast<std::int32_t>(problem.q.shape[1]);
  s.dim = static_cast<std::int32_t>(problem.q.shape[2]);
  s.steps = nq / (s.requests * s.next_n);
  if (s.steps == 0) {
    return fail(ErrorCode::invalid_argument,
                fmt::format("there are {} queries; a step of {} requests with {} draft tokens takes {}", nq, s.requests, s.next_n,
                            s.requests * s.next_n));
  }

  const std::int64_t pages = (nk + s.page_size - 1) / s.page_size;
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  Gaussian random(seed);
  for (std::size_t n = order.size(); n > 1; --n) std::swap(order[n - 1], order[random.below(n)]);
  for (std::int64_t r = 0; r < s.requests; ++r) s.block_table.insert(s.block_table.end(), order.begin(), order.end());
  s.kv_cache.resize(static_cast<std::size_t>(pages * s.page_size * (s.dim + 4)));
  for (std::int64_t key = 0; key < nk; ++key) {
    std::uint8_t* page = s.kv_cache.data() + order[static_cast<std::size_t>(key / s.page_size)] * s.page_size * (s.dim + 4);
    const std::int64_t offset = key % s.page_size;
    std::copy_n(problem.k.at<std::uint8_t>(key), s.dim, page + offset * s.dim);
    std::memcpy(page + s.page_size * s.dim + offset * 4, problem.k_scale.at<float>(key), 4);
  }

  const std::int64_t stretch = s.steps * s.next_n;
  for (std::int64_t step = 0; step < s.steps; ++step) {
    for (std::int64_t token = 0; token < s.requests * s.next_n; ++token) {
      const std::int64_t row = token / s.next_n * stretch + step * s.next_n + token % s.next_n;
      const VisibleRange visible = visible_range(problem, row);
      if (visible.begin != 0) {
        return fail(ErrorCode::invalid_argument, fmt::format("query {} sees keys from {} on; draft tokens see them from 0 on", row, visible.begin));
      }
      s.q.insert(s.q.end(), problem.q.at<std::uint8_t>(row), problem.q.at<std::uint8_t>(row) + problem.q.stride[0]);
      s.w.insert(s.w.end(), problem.w.at<float>(row), problem.w.at<float>(row) + s.heads);
      s.context_lens.push_back(static_cast<std::int32_t>(visible.end));
    }
  }
  return s;
}

}  // namespace dosa
