// Compiles kernels-inl.hpp once per instruction set and lists the results.
#include "backend/cpu/kernels.hpp"

#include <array>

// SSE has no fused multiply-add; SVE vectors cannot be kept in arrays, as the dots are. AVX3_DL (VNNI, VBMI) is off in
// Highway 1.0.3 unless asked for.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#define HWY_WANT_AVX3_DL

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "backend/cpu/kernels-inl.hpp"

#if HWY_ONCE
namespace dosa::cpu {
namespace {

struct Entry {
  const Kernels* kernels;
  std::int64_t target;
};

#if HWY_TARGETS & HWY_AVX3_DL
constexpr Kernels kAvx3Dl = N_AVX3_DL::make_kernels("avx3_dl");
#endif
#if HWY_TARGETS & HWY_AVX3
constexpr Kernels kAvx3 = N_AVX3::make_kernels("avx3");
#endif
#if HWY_TARGETS & HWY_AVX2
constexpr Kernels kAvx2 = N_AVX2::make_kernels("avx2");
#endif
#if HWY_TARGETS & HWY_NEON
constexpr Kernels kNeon = N_NEON::make_kernels("neon");
#endif

constexpr Entry kEntries[] = {
#if HWY_TARGETS & HWY_AVX3_DL
    {&kAvx3Dl, HWY_AVX3_DL},
#endif
#if HWY_TARGETS & HWY_AVX3
    {&kAvx3, HWY_AVX3},
#endif
#if HWY_TARGETS & HWY_AVX2
    {&kAvx2, HWY_AVX2},
#endif
#if HWY_TARGETS & HWY_NEON
    {&kNeon, HWY_NEON},
#endif
    {&kScalarKernels, 0},
};

}  // namespace

std::span<const Kernels* const> available_kernels() noexcept {
  struct List {
    std::array<const Kernels*, std::size(kEntries)> items{};
    std::size_t count = 0;
  };
  static const List list = [] {
    List made;
    for (const Entry& entry : kEntries) {
      if (entry.target == 0 || (hwy::SupportedTargets() & entry.target) != 0) made.items[made.count++] = entry.kernels;
    }
    return made;
  }();
  return {list.items.data(), list.count};
}

const Kernels* find_kernels(std::string_view name) noexcept {
  for (const Kernels* kernels : available_kernels()) {
    if (kernels->name == name) return kernels;
  }
  return nullptr;
}

}  // namespace dosa::cpu
#endif
