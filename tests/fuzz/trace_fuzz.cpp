// Any bytes: a trace is refused with a reason, or every element its Problem promises can be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "io/trace.hpp"

namespace {

std::uint64_t checksum(const dosa::TensorView& view) {
  std::int64_t bytes = static_cast<std::int64_t>(dosa::size_of(view.dtype));
  for (int axis = 0; axis < view.rank; ++axis) bytes *= view.shape[static_cast<std::size_t>(axis)];
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; view.present() && i < bytes; ++i) sum += static_cast<const std::uint8_t*>(view.data)[i];
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto trace = dosa::Trace::parse({bytes, bytes + size});
  if (!trace) return trace.error().message.empty() ? std::abort(), 0 : 0;
  volatile std::uint64_t sink = 0;
  for (std::int64_t step = 0; step < trace->steps(); ++step) {
    const dosa::Problem p = trace->problem(step);
    for (const auto& view : {p.q, p.k, p.k_scale, p.w, p.ks, p.ke}) sink = sink + checksum(view);
    if (step == 0) sink = sink + checksum(p.kv_cache) + checksum(p.block_table);
  }
  return 0;
}
