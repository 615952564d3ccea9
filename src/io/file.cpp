#include "io/file.hpp"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include "base/error.hpp"

namespace dosa {
namespace {

tl::unexpected<Error> io_failure(const std::string& path, std::string_view what) {
  return fail(ErrorCode::io, fmt::format("{}: {}: {}", path, what, std::generic_category().message(errno)));
}

struct CloseDescriptor {
  int descriptor;
  ~CloseDescriptor() { ::close(descriptor); }
};

bool is_special(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

bool write_parts(std::FILE* file, std::span<const std::span<const std::byte>> parts) {
  for (const auto part : parts) {
    if (!part.empty() && std::fwrite(part.data(), 1, part.size(), file) != part.size()) return false;
  }
  return std::fflush(file) == 0;
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return io_failure(path, "cannot be opened");
  const CloseDescriptor close{descriptor};

  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return io_failure(path, "cannot be read");
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::io, fmt::format("{}: not a regular file", path));
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return MappedFile({});

  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (address == MAP_FAILED) return io_failure(path, "cannot be mapped");
  return MappedFile({static_cast<const std::byte*>(address), size});
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<void> write_file(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  const bool in_place = is_special(path);
  const std::string target = in_place ? path : fmt::format("{}.{}.part", path, ::getpid());
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(target.c_str(), "wb"), &std::fclose);
  if (!file) return io_failure(path, "cannot be created");
  const bool written = write_parts(file.get(), parts);
  const bool closed = std::fclose(file.release()) == 0;
  if (!written || !closed || (!in_place && std::rename(target.c_str(), path.c_str()) != 0)) {
    auto failure = io_failure(path, "cannot be written");
    if (!in_place) std::remove(target.c_str());
    return failure;
  }
  return {};
}

}  // namespace dosa
