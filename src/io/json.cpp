#include "io/json.hpp"

#include <vector>

#include <nlohmann/json.hpp>

namespace dosa {

using Json = nlohmann::ordered_json;

struct JsonObject::Impl {
  Json object = Json::object();

  void add(std::string_view key, Json value) { object[std::string(key)] = std::move(value); }

  template <typename T>
  void add_array(std::string_view key, std::span<const T> values) {
    add(key, std::vector<T>(values.begin(), values.end()));
  }
};

JsonObject::JsonObject() : impl_(std::make_unique<Impl>()) {}

JsonObject::JsonObject(std::string_view kind) : JsonObject() { add("dosa", kJsonVersion).add("kind", kind); }

JsonObject::JsonObject(JsonObject&&) noexcept = default;
JsonObject& JsonObject::operator=(JsonObject&&) noexcept = default;
JsonObject::~JsonObject() = default;

JsonObject& JsonObject::add(std::string_view key, std::string_view value) {
  impl_->add(key, value);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, bool value) {
  impl_->add(key, value);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, std::int64_t value) {
  impl_->add(key, value);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, double value) {
  impl_->add(key, value);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, const JsonObject& value) {
  impl_->add(key, value.impl_->object);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, std::span<const std::int64_t> values) {
  impl_->add_array(key, values);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, std::span<const double> values) {
  impl_->add_array(key, values);
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, std::span<const JsonObject> values) {
  Json array = Json::array();
  for (const JsonObject& value : values) array.push_back(value.impl_->object);
  impl_->add(key, std::move(array));
  return *this;
}

JsonObject& JsonObject::add(std::string_view key, std::span<const std::string> values) {
  impl_->add_array(key, values);
  return *this;
}

std::string JsonObject::line() const {
  // A path may hold bytes that are no UTF-8: they are replaced, not thrown on.
  return impl_->object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dosa
