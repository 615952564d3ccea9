// Building errors, and the invariant that stops on our own bugs.
#pragma once

#include <string>

#include "dosa/result.hpp"

namespace dosa {

inline tl::unexpected<Error> fail(ErrorCode code, std::string message) {
  return tl::unexpected<Error>(Error{code, std::move(message)});
}

/// Prints where and aborts, in every build: a broken invariant is our bug and must not become a wrong selection.
[[noreturn]] void broken_invariant(const char* what, const char* file, int line) noexcept;

}  // namespace dosa

#define DOSA_INVARIANT(condition) \
  ((condition) ? static_cast<void>(0) : ::dosa::broken_invariant(#condition, __FILE__, __LINE__))
