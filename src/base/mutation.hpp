// Deliberate bugs. Tests that stay green with one of them are theatre; only the mutation test is built with any.
#pragma once

#include <cstdint>

namespace dosa {

enum class Mutation : std::uint8_t {
  none,
  no_allowances,        ///< bounds forget every rounding
  reject_ties,          ///< the screen rejects U <= tau
  tau_too_high,         ///< tau is one ulp above what the witnesses prove
  duplicate_witnesses,  ///< a key may be a witness twice
};

#ifdef DOSA_MUTATIONS
inline Mutation current_mutation = Mutation::none;
inline bool mutated(Mutation mutation) noexcept { return current_mutation == mutation; }
#else
constexpr bool mutated(Mutation /*mutation*/) noexcept { return false; }
#endif

}  // namespace dosa
