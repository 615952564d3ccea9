// The safetensors format: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
// https://github.com/huggingface/safetensors; nothing that a file claims is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dosa/result.hpp"

namespace dosa {

/// One tensor: row-major, contiguous. `bytes` lies in the buffer that was parsed, or that is to be written.
struct StoredTensor {
  std::string name;
  std::string dtype;  ///< as the file spells it: "F8_E4M3", "F32", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

using Metadata = std::map<std::string, std::string>;

struct Safetensors {
  std::vector<StoredTensor> tensors;  ///< in the order of their bytes
  Metadata metadata;

  /// nullptr if there is none of that name.
  [[nodiscard]] const StoredTensor* find(std::string_view name) const noexcept;
};

/// Longest header accepted, in bytes; the format's own limit.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

/// Parses a whole file. On success every tensor's bytes lie in `file`, without overlap or holes, are a multiple of
/// their element size long and, counted from the start of the file, aligned to it, and hold exactly shape x element
/// size (for the dtypes of the format; a tensor of an unknown dtype is kept with whatever size it has). Errors:
/// bad_file.
Result<Safetensors> parse_safetensors(std::span<const std::byte> file);

/// Writes a file that parse_safetensors and every other reader accepts; tensors with wide elements come first, so that
/// all are aligned. Errors: io.
Result<void> write_safetensors(const std::string& path, std::vector<StoredTensor> tensors, const Metadata& metadata);

/// A name from a file as it may be printed: quoted, at most 64 characters, one line.
std::string printable(std::string_view name);

}  // namespace dosa
