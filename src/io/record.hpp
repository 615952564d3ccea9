// JSON text for people's other programs: one object a line.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace dosa {

/// Version of every line that the program prints; raised when a field changes its meaning or goes away.
inline constexpr int kRecordVersion = 1;

/// A JSON object that keeps the order in which its fields were added. Keeps the JSON library out of every other file.
class Record {
 public:
  /// An empty object.
  Record();
  /// {"dosa": version, "kind": kind}: the start of every line.
  explicit Record(std::string_view kind);
  Record(Record&&) noexcept;
  Record& operator=(Record&&) noexcept;
  ~Record();

  Record& add(std::string_view key, std::string_view value);
  Record& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  Record& add(std::string_view key, bool value);
  Record& add(std::string_view key, std::int32_t value) { return add(key, static_cast<std::int64_t>(value)); }
  Record& add(std::string_view key, std::int64_t value);
  /// Not finite: null, because JSON has no such number.
  Record& add(std::string_view key, double value);
  Record& add(std::string_view key, const Record& value);
  Record& add(std::string_view key, std::span<const std::int64_t> values);
  Record& add(std::string_view key, std::span<const double> values);
  Record& add(std::string_view key, std::span<const Record> values);
  Record& add(std::string_view key, std::span<const std::string> values);

  /// The object on one line, without a newline at its end.
  [[nodiscard]] std::string line() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dosa
