#include "io/record.hpp"

#include <vector>

#include <nlohmann/json.hpp>

namespace dosa {

using Json = nlohmann::ordered_json;

struct Record::Impl {
  Json object = Json::object();

  void add(std::string_view key, Json value) { object[std::string(key)] = std::move(value); }

  template <typename T>
  void add_array(std::string_view key, std::span<const T> values) {
    add(key, std::vector<T>(values.begin(), values.end()));
  }
};

Record::Record() : impl_(std::make_unique<Impl>()) {}

Record::Record(std::string_view kind) : Record() { add("dosa", kRecordVersion).add("kind", kind); }

Record::Record(Record&&) noexcept = default;
Record& Record::operator=(Record&&) noexcept = default;
Record::~Record() = default;

Record& Record::add(std::string_view key, std::string_view value) {
  impl_->add(key, value);
  return *this;
}

Record& Record::add(std::string_view key, bool value) {
  impl_->add(key, value);
  return *this;
}

Record& Record::add(std::string_view key, std::int64_t value) {
  impl_->add(key, value);
  return *this;
}

Record& Record::add(std::string_view key, double value) {
  impl_->add(key, value);
  return *this;
}

Record& Record::add(std::string_view key, const Record& value) {
  impl_->add(key, value.impl_->object);
  return *this;
}

Record& Record::add(std::string_view key, std::span<const std::int64_t> values) {
  impl_->add_array(key, values);
  return *this;
}

Record& Record::add(std::string_view key, std::span<const double> values) {
  impl_->add_array(key, values);
  return *this;
}

Record& Record::add(std::string_view key, std::span<const Record> values) {
  Json array = Json::array();
  for (const Record& value : values) array.push_back(value.impl_->object);
  impl_->add(key, std::move(array));
  return *this;
}

Record& Record::add(std::string_view key, std::span<const std::string> values) {
  impl_->add_array(key, values);
  return *this;
}

std::string Record::line() const {
  // A path may hold bytes that are no UTF-8: they are replaced, not thrown on.
  return impl_->object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace dosa
