// The floating-point environment that reference scores are defined in.
#pragma once

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dosa {

/// Round to nearest, subnormals kept, exceptions masked, for this thread and this scope; restores what it found.
class ScopedFloatEnvironment {
 public:
  ScopedFloatEnvironment() noexcept {
    std::feholdexcept(&saved_);
    std::fesetround(FE_TONEAREST);
#if defined(__x86_64__)
    constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
    _mm_setcsr(_mm_getcsr() & ~(flush_to_zero | denormals_are_zero));
#elif defined(__aarch64__)
    constexpr std::uint64_t flush_to_zero = std::uint64_t{1} << 24;
    std::uint64_t control = 0;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    asm volatile("msr fpcr, %0" ::"r"(control & ~flush_to_zero));
#endif
  }
  ~ScopedFloatEnvironment() { std::fesetenv(&saved_); }
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_{};
};

}  // namespace dosa
