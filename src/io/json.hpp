// JSON text for people's other programs: one object a line.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace dosa {

/// Version of every line that the program prints; raised when a field changes its meaning or goes away.
inline constexpr int kJsonVersion = 1;

/// A JSON object that keeps the order in which its fields were added. Keeps the JSON library out of every other file.
class JsonObject {
 public:
  /// An empty object.
  JsonObject();
  /// {"dosa": version, "kind": kind}: the start of every line.
  explicit JsonObject(std::string_view kind);
  JsonObject(JsonObject&&) noexcept;
  JsonObject& operator=(JsonObject&&) noexcept;
  ~JsonObject();

  JsonObject& add(std::string_view key, std::string_view value);
  JsonObject& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  JsonObject& add(std::string_view key, bool value);
  JsonObject& add(std::string_view key, std::int32_t value) { return add(key, static_cast<std::int64_t>(value)); }
  JsonObject& add(std::string_view key, std::int64_t value);
  /// Not finite: null, because JSON has no such number.
  JsonObject& add(std::string_view key, double value);
  JsonObject& add(std::string_view key, const JsonObject& value);
  JsonObject& add(std::string_view key, std::span<const std::int64_t> values);
  JsonObject& add(std::string_view key, std::span<const double> values);
  JsonObject& add(std::string_view key, std::span<const JsonObject> values);
  JsonObject& add(std::string_view key, std::span<const std::string> values);

  /// The object on one line, without a newline at its end.
  [[nodiscard]] std::string line() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dosa
