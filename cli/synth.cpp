// Traces made up for tests and benchmarks.
#include "io/synth.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/keys.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/trace.hpp"
#include "run.hpp"

namespace dosa::cli {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int32_t kScoresDim = 128;

/// n scores, the i-th from `score(i)`.
template <typename Score>
std::vector<float> scores_of(std::int64_t n, Score score) {
  std::vector<float> scores(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) scores[static_cast<std::size_t>(i)] = score(i);
  return scores;
}

template <typename Score>
auto from_scores(Score score) {
  return [score](const AdversarialArgs& args) {
    return with_scores(scores_of(args.keys, [&](std::int64_t i) { return score(i, args.keys); }), args.queries,
                       std::max(args.heads, 2), kScoresDim);
  };
}

/// A spread of bits without a random generator: the same on every machine and for every n.
std::uint32_t scrambled(std::int64_t i) { return static_cast<std::uint32_t>(i) * 2654435761U; }

Activations random_base(const AdversarialArgs& args) {
  return random_activations(args.queries, args.keys, args.heads, kScoresDim, {}, 1);
}

/// A random problem, spoilt.
template <typename Spoil>
auto from_random(Spoil spoil) {
  return [spoil](const AdversarialArgs& args) {
    Activations a = random_base(args);
    spoil(a);
    return a;
  };
}

void mix_ranges(Activations& a) {
  const auto nk = static_cast<std::int32_t>(a.nk);
  const std::pair<std::int32_t, std::int32_t> ranges[] = {{0, nk}, {-5, nk + 5}, {3, 3},       {nk, 0},    {nk / 2, nk},
                                                          {0, 1},  {-10, -1},    {nk - 1, nk}, {7, nk / 3}};
  for (std::size_t j = 0; j < a.ks.size(); ++j) std::tie(a.ks[j], a.ke[j]) = ranges[j % std::size(ranges)];
}

struct Adversary {
  const char* name;
  const char* what;
  std::function<Activations(const AdversarialArgs&)> make;
};

const std::vector<Adversary>& adversaries() {
  static const std::vector<Adversary> list = {
      {"all-equal", "every key scores 1: ids 0..K-1 win", from_scores([](auto, auto) { return 1.0F; })},
      {"zeros", "every key scores +0", from_scores([](auto, auto) { return 0.0F; })},
      {"signed-zeros", "100 positive scores, then -0 and +0 in turn, which are equal",
       from_scores([](std::int64_t i, auto) { return i < 100      ? 1.0F
                                                     : i % 2 == 0 ? -0.0F
                                                                  : 0.0F; })},
      {"best-last", "scores grow with the key id",
       from_scores([](std::int64_t i, auto) { return static_cast<float>(i) / 64; })},
      {"best-first", "scores fall with the key id",
       from_scores([](std::int64_t i, std::int64_t n) { return static_cast<float>(n - i) / 64; })},
      {"ties", "a few clear winners, thousands of exact ties at the boundary, some losers",
       from_scores([](std::int64_t i, auto) { return i % 16 == 5   ? 2.0F
                                                     : i % 16 == 9 ? 0.5F
                                                                   : 1.0F; })},
      {"one-ulp", "neighbouring scores differ by one unit in the last place, in scrambled order",
       from_scores([](std::int64_t i, auto) { return 1.0F + static_cast<float>(scrambled(i) >> 12) * 0x1p-23F; })},
      {"narrow-band", "almost all scores in [1, 1.245)",
       from_scores([](std::int64_t i, auto) { return 1.0F + 0.245F * static_cast<float>(scrambled(i)) * 0x1p-32F; })},
      {"heavy-tail", "nine in ten scores within 1e-3 of zero, the others spread over decades",
       from_scores([](std::int64_t i, auto) {
         const float u = static_cast<float>(scrambled(i)) * 0x1p-31F - 1;
         return i % 10 == 0 ? std::exp(12 * u) : 1e-3F * u;
       })},
      {"all-negative", "every head weight is negative: no score above zero", from_random([](Activations& a) {
         for (float& w : a.w) w = -std::fabs(w);
       })},
      {"all-positive", "every head weight is positive", from_random([](Activations& a) {
         for (float& w : a.w) w = std::fabs(w);
       })},
      {"one-huge-head", "one head outweighs all others by 2^20", from_random([](Activations& a) {
         for (std::size_t i = 0; i < a.w.size(); i += static_cast<std::size_t>(a.heads)) a.w[i] *= 0x1p20F;
       })},
      {"subnormal", "scores below the smallest normal number",
       from_scores([](std::int64_t i, auto) { return static_cast<float>(scrambled(i) >> 16) * 0x1p-149F; })},
      {"huge", "components, weights and scales at their largest", from_random([](Activations& a) {
         std::ranges::fill(a.q, std::uint8_t{0x7E});
         std::ranges::fill(a.k, std::uint8_t{0x7E});
         std::ranges::fill(a.w, 1.0F);
         std::ranges::fill(a.k_scale, 448.0F);
       })},
      {"nan", "five keys in six score NaN",
       from_scores([](std::int64_t i, auto) { return i % 6 == 0 ? static_cast<float>(i) : kNan; })},
      {"all-nan", "every key scores NaN: ids 0..K-1 fill the row", from_scores([](auto, auto) { return kNan; })},
      {"inf", "128 keys of +inf, 128 of -inf, finite ones between", from_scores([](std::int64_t i, std::int64_t n) {
         return i < 128 ? -kInf : i >= n - 128 ? kInf : static_cast<float>(scrambled(i) >> 8);
       })},
      {"nan-bytes", "NaN bytes in some keys and in one query", from_random([](Activations& a) {
         for (std::size_t i = 0; i < a.k.size(); i += 1001) a.k[i] = i % 2 == 0 ? 0x7F : 0xFF;
         if (!a.q.empty()) a.q[a.q.size() / 2] = 0x7F;
       })},
      {"odd-weights", "head weights that are NaN, inf, zero and -0, one query each", from_random([](Activations& a) {
         const float odd[] = {kNan, kInf, 0.0F, -0.0F, -kInf};
         for (std::int64_t j = 0; j < a.nq; ++j) a.w[static_cast<std::size_t>(j * a.heads)] = odd[j % 5];
       })},
      {"odd-scales", "key scales that are zero, subnormal, negative, inf and NaN", from_random([](Activations& a) {
         const float odd[] = {0.0F, 1e-40F, -1.0F, kInf, kNan, -0.0F, 1e-38F};
         for (std::size_t i = 0; i < a.k_scale.size(); i += 13) a.k_scale[i] = odd[i / 13 % 7];
       })},
      {"same-keys", "all keys are copies of one", from_random([](Activations& a) {
         for (std::size_t i = static_cast<std::size_t>(a.dim); i < a.k.size(); ++i) {
           a.k[i] = a.k[i - static_cast<std::size_t>(a.dim)];
         }
         std::ranges::fill(a.k_scale, 0.01F);
       })},
      {"ranges", "visible ranges that are whole, empty, reversed, negative, too long and short",
       from_random(mix_ranges)},
  };
  return list;
}

Result<std::vector<float>> parse_scores(std::string_view text) {
  std::vector<float> scores;
  constexpr std::string_view separators = ", \t\r\n";
  for (std::size_t at = text.find_first_not_of(separators); at != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(separators, at), text.size());
    const std::string word(text.substr(at, end - at));
    char* rest = nullptr;
    scores.push_back(std::strtof(word.c_str(), &rest));
    if (*rest != '\0') {
      return fail(ErrorCode::invalid_argument, fmt::format("score {} is {}; it must be a number, nan, inf or -inf",
                                                           scores.size() - 1, printable(word)));
    }
    at = text.find_first_not_of(separators, end);
  }
  return scores;
}

std::optional<Error> refuse_pages(const Trace& trace, const std::string& path) {
  if (!is_paged(trace.problem())) return std::nullopt;
  return Error{ErrorCode::invalid_argument, fmt::format("{} has its keys in pages; they must be contiguous", path)};
}

Result<int> save(const std::string& out, const Activations& activations, Metadata metadata) {
  metadata["made_by"] = "dosa synth";
  if (auto saved = save_trace(out, activations.problem(), metadata); !saved) return tl::unexpected(saved.error());
  return kOk;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> adversarial_names() {
  std::vector<std::pair<std::string, std::string>> names;
  for (const Adversary& adversary : adversaries()) names.emplace_back(adversary.name, adversary.what);
  return names;
}

Result<int> synth_random(const RandomArgs& args, const std::string& out) {
  if (args.queries > args.keys) {
    return fail(ErrorCode::invalid_argument,
                fmt::format("--queries is {}; the queries are the last of the {} positions", args.queries, args.keys));
  }
  const Progress progress(fmt::format("making {} keys", args.keys));
  return save(
      out,
      random_activations(args.queries, args.keys, args.heads, args.dim, {args.positive, args.correlation}, args.seed),
      {{"family", "random"},
       {"positive", fmt::format("{}", args.positive)},
       {"correlation", fmt::format("{}", args.correlation)},
       {"seed", fmt::format("{}", args.seed)}});
}

Result<int> synth_adversarial(const AdversarialArgs& args, const std::string& out) {
  const auto found = std::ranges::find(adversaries(), args.name, &Adversary::name);
  if (found == adversaries().end()) {
    return fail(ErrorCode::invalid_argument, fmt::format("no adversarial input is called {}", printable(args.name)));
  }
  return save(out, found->make(args), {{"family", args.name}});
}

Result<int> synth_scores(const ScoresArgs& args, const std::string& out) {
  std::string text = args.inline_scores;
  if (!args.file.empty()) {
    auto file = MappedFile::open(args.file);
    if (!file) return tl::unexpected(file.error());
    text.assign(reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size());
  }
  auto scores = parse_scores(text);
  if (!scores) return tl::unexpected(scores.error());
  return save(out, with_scores(*scores, args.queries, 2, kScoresDim), {{"family", "scores"}});
}

Result<int> synth_extend(const ExtendArgs& args, const std::string& out) {
  auto trace = Trace::open(args.trace);
  if (!trace) return tl::unexpected(trace.error());
  if (auto refused = refuse_pages(*trace, args.trace)) return tl::unexpected(*refused);
  if (auto refused = refuse_to_replace(args.trace, out)) return tl::unexpected(*refused);
  const std::int64_t old = trace->problem().k.shape[0];
  if (args.keys < old || old == 0) {
    return fail(ErrorCode::invalid_argument,
                fmt::format("--keys is {}; {} has {} keys and can only be extended", args.keys, args.trace, old));
  }
  const Progress progress(fmt::format("making {} keys", args.keys - old));
  Metadata metadata = trace->metadata();
  metadata["extended_from"] = fmt::format("{} keys of {}", old, args.trace);
  metadata["jitter"] = fmt::format("{}", args.jitter);
  return save(out, extended(trace->problem(), args.keys, args.jitter, args.seed), std::move(metadata));
}

Result<int> synth_decode(const DecodeArgs& args, const std::string& out) {
  auto trace = Trace::open(args.trace);
  if (!trace) return tl::unexpected(trace.error());
  if (auto refused = refuse_pages(*trace, args.trace)) return tl::unexpected(*refused);
  if (auto refused = refuse_to_replace(args.trace, out)) return tl::unexpected(*refused);
  const auto stream = as_decode_stream(trace->problem(), {args.requests, args.next_n, args.page_size}, args.seed);
  if (!stream) return tl::unexpected(stream.error());
  Metadata metadata = trace->metadata();
  metadata["decodes"] = args.trace;
  metadata["made_by"] = "dosa synth";
  if (auto saved = save_decode_trace(out, stream->tensors(), metadata); !saved) return tl::unexpected(saved.error());
  return kOk;
}

}  // namespace dosa::cli
