#include "base/error.hpp"

#include <cstdio>
#include <cstdlib>

namespace dosa {

void broken_invariant(const char* what, const char* file, int line) noexcept {
  std::fprintf(stderr, "dosa: broken invariant: %s (%s:%d); this is a bug of dosa\n", what, file, line);
  std::abort();
}

}  // namespace dosa
