// Files: read by mapping, written whole or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "dosa/result.hpp"

namespace dosa {

/// A regular file mapped read-only. Its pages count as resident only once they are touched. Shrinking the file while it
/// is mapped ends the process (SIGBUS), as with every mapping.
class MappedFile {
 public:
  /// Errors: io (cannot be opened or mapped, or not a regular file).
  static Result<MappedFile> open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

/// Writes the parts one after the other, beside `path` first and then renamed over it: a reader, or a mapping of the
/// old file, never sees half a file. A path that exists and is no regular file (/dev/stdout) is written in place.
/// Errors: io.
Result<void> write_file(const std::string& path, std::span<const std::span<const std::byte>> parts);

}  // namespace dosa
