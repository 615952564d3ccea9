#include "dosa/indexer.hpp"

namespace dosa {

const char* version() noexcept { return DOSA_VERSION; }

}  // namespace dosa
