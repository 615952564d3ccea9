// The library's errors as Python's: dosa._errors has a class for each kind.
#pragma once

#include <nanobind/nanobind.h>
#include <stdexcept>

#include "dosa/result.hpp"

namespace dosa::python {

/// On its way to Python; core.cpp translates it.
class Failure : public std::runtime_error {
 public:
  explicit Failure(const Error& error) : std::runtime_error(error.message), code(error.code) {}
  ErrorCode code;
};

[[noreturn]] inline void refuse(std::string message) {
  throw Failure({ErrorCode::invalid_argument, std::move(message)});
}

template <typename T>
T value_of(Result<T> result) {
  if (!result) throw Failure(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace dosa::python
