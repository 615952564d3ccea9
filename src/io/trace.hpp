// Traces: indexer activations on disk, as a Problem; and selections on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "dosa/problem.hpp"
#include "dosa/result.hpp"
#include "io/file.hpp"
#include "io/safetensors.hpp"

namespace dosa {

/// A trace file and the Problem that views it. Moving a Trace keeps its Problem valid.
///
///   q        F8_E4M3 or U8 [nq, heads, dim]        k        F8_E4M3 or U8 [nk, dim]
///   k_scale  F32 [nk]                              w        F32 [nq, heads]
///   q_pos    I32 [nq]: the query sees keys 0..q_pos inclusive; or ks and ke I32 [nq]; not both
///
/// or, with keys in pages, `steps` steps of decoding one batch of B requests with n draft tokens each:
///
///   kv_cache U8 or F8_E4M3 [pages, page_size, 1, dim + 4]        block_table   I32 [B, max_blocks]
///   q        F8_E4M3 or U8 [steps, B, n, heads, dim]             context_lens  I32 [steps, B, n]
///   w        F32 [steps, B, n, heads]
///
/// Other tensors are ignored, metadata is free.
class Trace {
 public:
  /// Maps the file; keys are read when they are used. Errors: io, bad_file.
  static Result<Trace> open(const std::string& path);
  /// The same from memory. Errors: bad_file.
  static Result<Trace> parse(std::vector<std::byte> file);

  /// 1 where keys are contiguous.
  [[nodiscard]] std::int64_t steps() const noexcept { return steps_; }
  /// One step, with the default topk.
  [[nodiscard]] Problem problem(std::int64_t step = 0) const noexcept;
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }

 private:
  Trace() = default;
  Result<void> view(std::span<const std::byte> bytes);
  Result<void> view_contiguous(const Safetensors& file);
  Result<void> view_pages(const Safetensors& file);

  std::variant<std::monostate, MappedFile, std::vector<std::byte>> file_;
  std::vector<std::int32_t> ke_from_q_pos_;
  Problem problem_;  // the first step
  std::int64_t steps_ = 1;
  Metadata metadata_;
};

/// Writes a problem as a trace with ks and ke; topk and hints are not part of a trace. Errors: io.
Result<void> save_trace(const std::string& path, const Problem& problem, const Metadata& metadata);

/// The tensors of a decode trace, in the shapes above.
struct DecodeTensors {
  TensorView q, w, kv_cache, block_table, context_lens;
};

/// Errors: io.
Result<void> save_decode_trace(const std::string& path, const DecodeTensors& tensors, const Metadata& metadata);

/// Writes ids I32 [nq, K], and scores F32 [nq, K] if present. Errors: io.
Result<void> save_selection(const std::string& path, const Selection& selection, const Metadata& metadata);

}  // namespace dosa
