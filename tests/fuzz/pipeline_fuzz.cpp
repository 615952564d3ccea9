// Any bytes as a small problem: every method on every implementation must equal the oracle, with keys in pages too.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "support/cases.hpp"
#include "support/check.hpp"
#include "support/paged.hpp"

namespace {

using namespace dosa;

/// The input, read in a circle, so that a few bytes make a whole problem and every byte of a large one matters.
class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}

  std::uint8_t byte() { return data_.empty() ? 0 : data_[next_++ % data_.size()]; }
  int below(int n) { return static_cast<int>((byte() | byte() << 8) % n); }
  float any_float() {
    std::uint32_t bits = 0;
    for (int n = 0; n < 4; ++n) bits = bits << 8 | byte();
    return std::bit_cast<float>(bits);
  }
  /// Mostly of ordinary size, so that certificates exist.
  float mostly_ordinary() {
    const std::uint8_t kind = byte();
    if (kind == 255) return any_float();
    return std::ldexp(static_cast<float>(static_cast<std::int8_t>(byte())), kind % 8 - 8);
  }

 private:
  std::span<const std::uint8_t> data_;
  std::size_t next_ = 0;
};

test::Case case_of(Bytes& in) {
  test::Case c;
  c.nq = in.below(5);
  c.nk = in.below(601);
  c.heads = 1 + in.below(8);
  c.topk = 1 + in.below(in.byte() % 4 == 0 ? 700 : 40);
  const std::uint8_t shape = in.byte();
  if (shape & 1) {
    for (std::int64_t j = 0; j < c.nq; ++j) {
      c.ks.push_back(in.below(700) - 50);
      c.ke.push_back(shape & 2 ? in.below(700) - 20 : static_cast<std::int32_t>(c.nk) + in.below(20) - 10);
    }
  }
  if (shape & 4) {
    for (int n = in.below(100); n >= 0; --n) c.hints.push_back(in.below(700) - 50);
  }
  for (std::int64_t n = 0; n < c.nq * c.heads * c.dim; ++n) c.q.push_back(in.byte());
  for (std::int64_t n = 0; n < c.nq * c.heads; ++n) c.w.push_back(in.mostly_ordinary());
  for (std::int64_t n = 0; n < c.nk * c.dim; ++n) c.k.push_back(in.byte());
  for (std::int64_t n = 0; n < c.nk; ++n) c.k_scale.push_back(shape & 8 ? 1.0F : in.mostly_ordinary());
  if (!(shape & 16)) {  // a NaN byte exempts a row or a key: without them, more is screened
    for (auto* array : {&c.q, &c.k}) {
      for (std::uint8_t& byte : *array) byte = (byte & 0x7F) == 0x7F ? 0x7E : byte;
    }
    for (float& w : c.w) w = std::isfinite(w) ? w : 1.0F;
  }
  if (shape & 32) {
    for (float& scale : c.k_scale) scale = std::fabs(scale);
  }
  return c;
}

Options options_of(Bytes& in) {
  Options o;
  o.threads = in.byte() % 16 == 0 ? 3 : 1;
  o.order = static_cast<Order>(in.below(2));
  o.index_space = static_cast<IndexSpace>(in.below(2));
  o.seeds = static_cast<SeedPolicy>(in.below(4));
  o.certificate.form = static_cast<Form>(in.below(4));
  o.certificate.row_budget = in.below(11);
  o.certificate.aggregates = in.below(5);
  o.certificate.precision = static_cast<ScreenPrecision>(in.below(3));
  o.min_context = in.below(2);
  return o;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<std::string> implementations = cpu_implementations();
  Bytes in({data, size});
  Options options = options_of(in);
  const test::Case c = case_of(in);
  Problem problem = c.problem();
  const auto expected = test::expected_rows(problem);
  const bool in_pages = in.byte() % 2 == 1;
  const test::PagedProblem paged({&problem, 1}, in.byte(), {.page_size = std::int64_t{16} << in.below(5), .gap = 4 * in.below(9)});
  if (in_pages) {
    problem = paged.problem();
    options.index_space = static_cast<IndexSpace>(in.below(3));
  }
  for (const std::string& implementation : implementations) {
    for (const Method method : {Method::dense, Method::fused, Method::dosa, Method::automatic}) {
      options.method = method;
      options.implementation = implementation;
      if (const auto result = test::exact(problem, expected, options); !result) {
        std::fprintf(stderr, "%s\n", result.message());
        std::abort();
      }
    }
  }
  return 0;
}
