#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.hpp"
#include "io/file.hpp"
#include "io/json.hpp"

namespace dosa {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors numbers are little-endian and are read in place");

constexpr std::string_view kMetadataName = "__metadata__";
constexpr std::size_t kLengthBytes = 8;

struct FileDType {
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::array kFileDTypes = {
    FileDType{"BOOL", 1}, FileDType{"U8", 1},  FileDType{"I8", 1},  FileDType{"F8_E5M2", 1}, FileDType{"F8_E4M3", 1},
    FileDType{"I16", 2},  FileDType{"U16", 2}, FileDType{"F16", 2}, FileDType{"BF16", 2},    FileDType{"I32", 4},
    FileDType{"U32", 4},  FileDType{"F32", 4}, FileDType{"F64", 8}, FileDType{"I64", 8},     FileDType{"U64", 8},
};

/// Bytes of one element, or nothing for a dtype this reader does not know.
std::optional<std::int64_t> element_bytes(std::string_view dtype) noexcept {
  const auto* found = std::ranges::find(kFileDTypes, dtype, &FileDType::name);
  if (found == kFileDTypes.end()) return std::nullopt;
  return found->bytes;
}

/// What the header claims of one tensor, before it is compared with the bytes that are there.
struct Claim {
  StoredTensor tensor;
  std::uint64_t begin = 0, end = 0;  ///< from the first byte after the header
};

/// Reads exactly the header's grammar out of the JSON parser's events, and stops at the first event that is not part of
/// it. Events rather than a tree: a tree would have swallowed duplicate names, and its size is not bounded by ours.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Claim> claims;
  Metadata metadata;
  std::string problem;  ///< why reading stopped

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { return unexpected(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return unexpected(fmt::format("{}", value));
    }
    if (place_ == Place::shape) {
      claims.back().tensor.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets && offsets_ < 2) {
      (offsets_++ == 0 ? claims.back().begin : claims.back().end) = value;
      return true;
    }
    return unexpected(fmt::format("{}", value));
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      metadata.emplace(key_, value);
      return true;
    }
    if (place_ != Place::tensor || key_ != "dtype") return unexpected("a string");
    claims.back().tensor.dtype = value;
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::file) {
      place_ = Place::header;
    } else if (place_ == Place::header && key_ == kMetadataName) {
      place_ = Place::metadata;
    } else if (place_ == Place::header) {
      place_ = Place::tensor;
      fields_.clear();
      claims.emplace_back().tensor.name = key_;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    auto& seen = place_ == Place::header ? names_ : place_ == Place::metadata ? metadata_names_ : fields_;
    if (!seen.insert(name).second) return stop(fmt::format("name {} appears twice", printable(name)));
    if (place_ == Place::tensor && name != "dtype" && name != "shape" && name != "data_offsets") {
      return stop(fmt::format("tensor {} has a field {}; allowed are dtype, shape and data_offsets",
                              printable(claims.back().tensor.name), printable(name)));
    }
    key_ = name;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor && fields_.size() != 3) {
      return stop(fmt::format("tensor {} needs dtype, shape and data_offsets", printable(claims.back().tensor.name)));
    }
    place_ = place_ == Place::header ? Place::file : Place::header;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") return unexpected("an array");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && offsets_ != 2) {
      return stop(fmt::format("tensor {} has {} data_offsets; there must be 2", printable(claims.back().tensor.name),
                              offsets_));
    }
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    return stop(fmt::format("header is not valid JSON at byte {}", position));
  }

 private:
  enum class Place { file, header, metadata, tensor, shape, offsets };

  bool stop(std::string why) {
    problem = std::move(why);
    return false;
  }

  bool unexpected(std::string_view what) {
    const std::string_view where = place_ == Place::file ? "at the top" : "in the header";
    return stop(fmt::format("{} {} after {} does not belong there", printable(what), where, printable(key_)));
  }

  Place place_ = Place::file;
  std::string key_;
  int offsets_ = 0;
  std::set<std::string> names_, metadata_names_, fields_;
};

tl::unexpected<Error> bad(std::string message) { return fail(ErrorCode::bad_file, std::move(message)); }

/// Product of the shape and the element size, or nothing if it, or one of its strides, does not fit 63 bits.
std::optional<std::int64_t> shape_bytes(const StoredTensor& tensor, std::int64_t element) noexcept {
  std::int64_t bytes = element;
  for (const std::int64_t extent : tensor.shape) {
    // An extent of 0 must not hide the overflow of a stride.
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(extent, 1), &bytes)) return std::nullopt;
  }
  return std::ranges::find(tensor.shape, 0) == tensor.shape.end() ? bytes : 0;
}

/// Compares one claim with the `data` after the header, which starts `data_start` bytes into the file.
Result<void> settle(Claim& claim, std::span<const std::byte> data, std::uint64_t data_start) {
  StoredTensor& tensor = claim.tensor;
  if (claim.begin > claim.end || claim.end > data.size()) {
    return bad(fmt::format("tensor {} lies at bytes [{}, {}) but the file has {} bytes of data", printable(tensor.name),
                           claim.begin, claim.end, data.size()));
  }
  const std::uint64_t length = claim.end - claim.begin;
  if (const auto element = element_bytes(tensor.dtype)) {
    const auto expected = shape_bytes(tensor, *element);
    if (!expected || static_cast<std::uint64_t>(*expected) != length) {
      return bad(fmt::format("tensor {} of dtype {} and shape [{}] has {} bytes instead of {}", printable(tensor.name),
                             tensor.dtype, fmt::join(tensor.shape, ", "), length,
                             expected ? fmt::format("{}", *expected) : "more than fit 63 bits"));
    }
    if ((data_start + claim.begin) % static_cast<std::uint64_t>(*element) != 0) {
      return bad(fmt::format("tensor {} starts at byte {} of the file, which is no multiple of its element size {}",
                             printable(tensor.name), data_start + claim.begin, *element));
    }
  }
  tensor.bytes = data.subspan(claim.begin, length);
  return {};
}

/// The tensors must tile the data: no overlap, no hole, nothing behind the last. `claims` are sorted.
Result<void> check_tiling(std::span<const Claim> claims, std::uint64_t data_bytes) {
  std::uint64_t covered = 0;
  for (const Claim& claim : claims) {
    if (claim.begin != covered) {
      return bad(fmt::format("tensor {} starts at data byte {}, {} the tensor before it, which ends at {}",
                             printable(claim.tensor.name), claim.begin,
                             claim.begin < covered ? "overlapping" : "leaving a hole behind", covered));
    }
    covered = claim.end;
  }
  if (covered != data_bytes)
    return bad(fmt::format("the tensors end at data byte {}, the file at {}", covered, data_bytes));
  return {};
}

}  // namespace

std::string printable(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, 64)) text += std::isprint(static_cast<unsigned char>(c)) != 0 ? c : '?';
  return text + (name.size() > 64 ? "...'" : "'");
}

const StoredTensor* Safetensors::find(std::string_view name) const noexcept {
  const auto found = std::ranges::find(tensors, name, &StoredTensor::name);
  return found == tensors.end() ? nullptr : &*found;
}

Result<Safetensors> parse_safetensors(std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) return bad(fmt::format("{} bytes are too few for a safetensors file", file.size()));
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kMaxSafetensorsHeader || header_bytes > file.size() - kLengthBytes) {
    return bad(fmt::format("header length is {}; the file has {} bytes and a header may have {}", header_bytes,
                           file.size(), kMaxSafetensorsHeader));
  }
  const auto header = file.subspan(kLengthBytes, header_bytes);
  const auto data = file.subspan(kLengthBytes + header_bytes);

  HeaderReader reader;
  const auto* text = reinterpret_cast<const char*>(header.data());
  if (!nlohmann::json::sax_parse(text, text + header.size(), &reader)) return bad(std::move(reader.problem));

  for (Claim& claim : reader.claims) {
    if (auto settled = settle(claim, data, kLengthBytes + header_bytes); !settled)
      return tl::unexpected(settled.error());
  }
  std::ranges::sort(reader.claims, {}, [](const Claim& claim) { return std::pair(claim.begin, claim.end); });
  if (auto tiled = check_tiling(reader.claims, data.size()); !tiled) return tl::unexpected(tiled.error());

  Safetensors result{{}, std::move(reader.metadata)};
  result.tensors.reserve(reader.claims.size());
  for (Claim& claim : reader.claims) result.tensors.push_back(std::move(claim.tensor));
  return result;
}

Result<void> write_safetensors(const std::string& path, std::vector<StoredTensor> tensors, const Metadata& metadata) {
  std::ranges::sort(tensors, {}, [](const StoredTensor& tensor) {
    return std::pair<std::int64_t, std::string_view>(-element_bytes(tensor.dtype).value_or(1), tensor.name);
  });
  JsonObject header;
  if (!metadata.empty()) {
    JsonObject entries;
    for (const auto& [name, value] : metadata) entries.add(name, value);
    header.add(kMetadataName, entries);
  }
  std::int64_t offset = 0;
  for (const StoredTensor& tensor : tensors) {
    const std::array offsets{offset, offset + static_cast<std::int64_t>(tensor.bytes.size())};
    offset = offsets[1];
    header.add(tensor.name, JsonObject()
                                .add("dtype", tensor.dtype)
                                .add("shape", std::span<const std::int64_t>(tensor.shape))
                                .add("data_offsets", std::span<const std::int64_t>(offsets)));
  }
  std::string text = header.line();
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');  // so that the data is aligned
  const std::uint64_t length = text.size();

  std::vector<std::span<const std::byte>> parts{std::as_bytes(std::span(&length, 1)), std::as_bytes(std::span(text))};
  for (const StoredTensor& tensor : tensors) parts.push_back(tensor.bytes);
  return write_file(path, parts);
}

}  // namespace dosa
