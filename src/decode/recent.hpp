// Recent winners of a request: tomorrow's witnesses.
//
// Queries of neighbouring positions choose mostly the same keys. The caller keeps, per request, a row of ids: winners
// of the last steps, newest first, distinct, -1 behind them. Nothing depends on what the row holds: ids are rescored
// for the current query, and those that it does not see are passed over.
#pragma once

#include <cstdint>
#include <span>

#include <hwy/contrib/sort/vqsort.h>

namespace dosa {

/// Puts `winners` (distinct), in their order, in front of what `recent` held; the oldest fall out at its end. `scratch` is as
/// long as `winners`.
void remember(std::span<const std::int32_t> winners, std::span<std::int32_t> recent, std::span<std::int32_t> scratch,
              const hwy::Sorter& sorter);

}  // namespace dosa
