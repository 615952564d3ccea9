// The kernels of kernels.hpp for one instruction set. Re-included per target by Highway; no include guard of the usual kind.
#if defined(DOSA_CPU_KERNELS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef DOSA_CPU_KERNELS_INL
#undef DOSA_CPU_KERNELS_INL
#else
#define DOSA_CPU_KERNELS_INL
#endif

#include <limits>

#include "backend/cpu/kernels.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dosa::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Highway's fallback targets multiply and add with two roundings, which changes the reference's bits; scalar.cpp is ours.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
#define DOSA_TARGET_HAS_FMA 1

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Repartition<std::uint16_t, F32>;
using I32 = hn::RebindToSigned<F32>;
using VF = hn::Vec<F32>;

constexpr int kChunkVectors = 3;  // vectors of keys whose accumulators are in registers at once

HWY_INLINE int chunk_keys() { return kChunkVectors * static_cast<int>(hn::Lanes(F32())); }

// x > 0 ? x : +0. x86 max returns its second operand when one is a NaN or both are zero.
HWY_INLINE VF relu(F32 d, VF x) {
#if HWY_ARCH_X86
  return hn::Max(x, hn::Zero(d));
#else
  return hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), x);
#endif
}

// --- Packing: 48 rows of bytes -> [dim][48] floats ---------------------------------------------------------------------

constexpr int kColumn = 16;  // components that are transposed at a time

// A column of every fourth key: 128-bit blocks of one vector.
template <class D>
HWY_INLINE hn::Vec<D> load_column(D d, const std::uint8_t* const* keys, int column) {
  if constexpr (hn::MaxLanes(D()) * sizeof(hn::TFromD<D>) == kColumn) {
    return hn::BitCast(d, hn::LoadU(hn::Full128<std::uint8_t>(), *keys + column));
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_column(half, keys + hn::Lanes(half), column), load_column(half, keys, column));
  }
}

// A column of as many keys as a vector has lanes, transposed in words of four bytes.
HWY_INLINE void transpose_quads(const std::uint8_t* const* keys, int column, hn::Vec<U32>* quads) {
  const U32 d;
  const hn::Repartition<std::uint64_t, U32> d64;
  const auto r0 = load_column(d, keys, column), r1 = load_column(d, keys + 1, column);
  const auto r2 = load_column(d, keys + 2, column), r3 = load_column(d, keys + 3, column);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  quads[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  quads[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  quads[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  quads[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

// The high byte of each lane as a half: a half has E4M3's sign and fields in these places, and an exponent bias that is larger
// by 8, so that it is 2^-8 times the byte's value, subnormal ones included. A NaN byte comes out as 480 * 2^-8.
HWY_INLINE hn::Vec<U16> to_halves(U16 d, hn::Vec<U16> bytes) {
  const hn::RebindToSigned<U16> di;
  return hn::And(hn::BitCast(d, hn::ShiftRight<1>(hn::BitCast(di, bytes))), hn::Set(d, 0xBF80));
}

HWY_NOINLINE void put_nans(const std::uint8_t* const* keys, int dim, float* panel) {
  for (int key = 0; key < kPanelKeys; ++key) {
    for (int i = 0; i < dim; ++i) {
      if ((keys[key][i] & 0x7F) == 0x7F) panel[i * kPanelKeys + key] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

void pack_panel(const std::uint8_t* const* keys, int dim, float* HWY_RESTRICT panel) {
  const F32 d;
  const U16 d16;
  const hn::Half<U16> d16_half;
  const hn::Rebind<hwy::float16_t, F32> d_half;
  const hn::Repartition<std::uint8_t, F32> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const VF scale = hn::Set(d, 256.0F);
  auto largest = hn::Zero(d8);  // magnitudes
  HWY_ALIGN std::uint16_t halves[kColumn * kPanelKeys];
  for (int column = 0; column < dim; column += kColumn) {
    for (int key = 0; key < kPanelKeys; key += lanes) {
      hn::Vec<U32> quads[kColumn / 4];
      transpose_quads(keys + key, column, quads);
      for (int word = 0; word < kColumn / 4; word += 2) {
        const auto a = hn::BitCast(d16, quads[word]), b = hn::BitCast(d16, quads[word + 1]);
        const auto magnitude = [&](auto v) HWY_ATTR { return hn::And(hn::BitCast(d8, v), hn::Set(d8, 0x7F)); };
        largest = hn::Max(largest, hn::Max(magnitude(a), magnitude(b)));
        std::uint16_t* out = halves + 4 * word * kPanelKeys + key;
        const auto store = [&](hn::Vec<U16> v, int byte) HWY_ATTR {
          hn::StoreU(hn::LowerHalf(d16_half, v), d16_half, out + byte * kPanelKeys);
          hn::StoreU(hn::UpperHalf(d16_half, v), d16_half, out + (4 + byte) * kPanelKeys);
        };
        const auto bytes01 = hn::ConcatEven(d16, b, a), bytes23 = hn::ConcatOdd(d16, b, a);
        store(to_halves(d16, hn::ShiftLeft<8>(bytes01)), 0);
        store(to_halves(d16, bytes01), 1);
        store(to_halves(d16, hn::ShiftLeft<8>(bytes23)), 2);
        store(to_halves(d16, bytes23), 3);
      }
    }
    const auto* at = reinterpret_cast<const hwy::float16_t*>(halves);
    float* out = panel + column * kPanelKeys;
    for (int i = 0; i < kColumn * kPanelKeys; i += lanes) {
      hn::StoreU(hn::Mul(hn::PromoteTo(d, hn::LoadU(d_half, at + i)), scale), d, out + i);
    }
  }
  if (!hn::AllFalse(d8, hn::Eq(largest, hn::Set(d8, 0x7F)))) put_nans(keys, dim, panel);
}

// --- Dots: 4 rows x 3 vectors of keys in registers -----------------------------------------------------------------------

struct Dots {
  VF x[kRowGroup][kChunkVectors];
};

HWY_INLINE Dots dot_group(F32 d, const float* HWY_RESTRICT panel, const float* HWY_RESTRICT rows, int dim) {
  const std::size_t lanes = hn::Lanes(d);
  VF a00 = hn::Zero(d), a01 = a00, a02 = a00, a10 = a00, a11 = a00, a12 = a00;
  VF a20 = a00, a21 = a00, a22 = a00, a30 = a00, a31 = a00, a32 = a00;
  for (int i = 0; i < dim; ++i) {
    const float* k = panel + i * kPanelKeys;
    const float* q = rows + i * kRowGroup;
    const VF k0 = hn::LoadU(d, k), k1 = hn::LoadU(d, k + lanes), k2 = hn::LoadU(d, k + 2 * lanes);
    VF b = hn::Set(d, q[0]);
    a00 = hn::MulAdd(b, k0, a00), a01 = hn::MulAdd(b, k1, a01), a02 = hn::MulAdd(b, k2, a02);
    b = hn::Set(d, q[1]);
    a10 = hn::MulAdd(b, k0, a10), a11 = hn::MulAdd(b, k1, a11), a12 = hn::MulAdd(b, k2, a12);
    b = hn::Set(d, q[2]);
    a20 = hn::MulAdd(b, k0, a20), a21 = hn::MulAdd(b, k1, a21), a22 = hn::MulAdd(b, k2, a22);
    b = hn::Set(d, q[3]);
    a30 = hn::MulAdd(b, k0, a30), a31 = hn::MulAdd(b, k1, a31), a32 = hn::MulAdd(b, k2, a32);
  }
  return {{{a00, a01, a02}, {a10, a11, a12}, {a20, a21, a22}, {a30, a31, a32}}};
}

void dot_panel(const float* panel, const float* q, int dim, int rows, float* x, std::int64_t stride) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int key = 0; key < kPanelKeys; key += chunk_keys()) {
    for (int row = 0; row < rows; row += kRowGroup) {
      const Dots dots = dot_group(d, panel + key, q + row * dim, dim);
      for (int r = 0; r < kRowGroup && row + r < rows; ++r) {
        for (int v = 0; v < kChunkVectors; ++v) hn::StoreU(dots.x[r][v], d, x + (row + r) * stride + key + v * lanes);
      }
    }
  }
}

void score_panel(const ScoreArgs& args, float* HWY_RESTRICT scores) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int key = 0; key < kPanelKeys; key += chunk_keys()) {
    VF s0 = hn::Zero(d), s1 = s0, s2 = s0;
    const auto add_head = [&](const VF* x, float weight) HWY_ATTR {
      const VF w = hn::Set(d, weight);
      s0 = hn::MulAdd(w, relu(d, x[0]), s0);
      s1 = hn::MulAdd(w, relu(d, x[1]), s1);
      s2 = hn::MulAdd(w, relu(d, x[2]), s2);
    };
    int head = 0;
    for (; head + kRowGroup <= args.heads; head += kRowGroup) {
      const Dots dots = dot_group(d, args.panel + key, args.q + head * args.dim, args.dim);
      for (int r = 0; r < kRowGroup; ++r) add_head(dots.x[r], args.w[head + r]);
    }
    if (head < args.heads) {
      const Dots dots = dot_group(d, args.panel + key, args.q + head * args.dim, args.dim);
      for (int r = 0; head + r < args.heads; ++r) add_head(dots.x[r], args.w[head + r]);
    }
    const float* scale = args.k_scale + key;
    hn::StoreU(hn::Mul(hn::LoadU(d, scale), s0), d, scores + key);
    hn::StoreU(hn::Mul(hn::LoadU(d, scale + lanes), s1), d, scores + key + lanes);
    hn::StoreU(hn::Mul(hn::LoadU(d, scale + 2 * lanes), s2), d, scores + key + 2 * lanes);
  }
}

// --- Bounds ----------------------------------------------------------------------------------------------------------------

// u of one chunk of keys while rows are added to it.
struct BoundChunk {
  VF u0, u1, u2;

  HWY_INLINE void add(F32 d, VF x0, VF x1, VF x2, float weight, bool linear) {
    const VF w = hn::Set(d, weight);
    if (!linear) x0 = relu(d, x0), x1 = relu(d, x1), x2 = relu(d, x2);
    u0 = hn::MulAdd(w, x0, u0), u1 = hn::MulAdd(w, x1, u1), u2 = hn::MulAdd(w, x2, u2);
  }
  HWY_INLINE void store(F32 d, const float* alpha, float* bounds) const {
    const std::size_t lanes = hn::Lanes(d);
    hn::StoreU(hn::Mul(hn::LoadU(d, alpha), u0), d, bounds);
    hn::StoreU(hn::Mul(hn::LoadU(d, alpha + lanes), u1), d, bounds + lanes);
    hn::StoreU(hn::Mul(hn::LoadU(d, alpha + 2 * lanes), u2), d, bounds + 2 * lanes);
  }
};

void bound_panel(const BoundArgs& args, float* HWY_RESTRICT bounds) {
  const F32 d;
  const std::size_t lanes = hn::Lanes(d);
  const int relu_rows = args.rows - args.linear_rows;
  for (int key = 0; key < kPanelKeys; key += chunk_keys()) {
    const VF c = hn::Set(d, args.c);
    const float* rho = args.rho + key;
    BoundChunk u{hn::Mul(c, hn::LoadU(d, rho)), hn::Mul(c, hn::LoadU(d, rho + lanes)),
                 hn::Mul(c, hn::LoadU(d, rho + 2 * lanes))};
    for (int row = 0; row < args.rows; row += kRowGroup) {
      const Dots dots = dot_group(d, args.panel + key, args.row_data + row * args.dim, args.dim);
      for (int r = 0; r < kRowGroup && row + r < args.rows; ++r) {
        u.add(d, dots.x[r][0], dots.x[r][1], dots.x[r][2], args.weight[row + r], row + r >= relu_rows);
      }
    }
    u.store(d, args.alpha + key, bounds + key);
  }
}

void norm_panel(const float* HWY_RESTRICT panel, int dim, float* HWY_RESTRICT rho, float* HWY_RESTRICT rho_e) {
  const F32 d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const VF quarter = hn::Set(d, 0.25F), minus_four = hn::Set(d, -4.0F), factor = hn::Set(d, norm_factor(dim));
  const VF zero = hn::Zero(d), smallest = hn::Set(d, kSmallestSquare);
  for (int key = 0; key < kPanelKeys; key += chunk_keys()) {
    VF n0 = zero, n1 = zero, n2 = zero, e0 = zero, e1 = zero, e2 = zero;
    const auto add = [&](const float* at, VF& n, VF& e) HWY_ATTR {
      const VF k = hn::LoadU(d, at);
      const VF rest = hn::MulAdd(minus_four, hn::Round(hn::Mul(k, quarter)), k);  // exact
      n = hn::MulAdd(k, k, n);
      e = hn::MulAdd(rest, rest, e);
    };
    for (int i = 0; i < dim; ++i) {
      const float* at = panel + i * kPanelKeys + key;
      add(at, n0, e0), add(at + lanes, n1, e1), add(at + 2 * lanes, n2, e2);
    }
    const auto store = [&](VF n, VF e, int at) HWY_ATTR {
      // A NaN sum compares false and stays.
      const VF raised = hn::IfThenElse(hn::Lt(n, smallest), smallest, n);
      hn::StoreU(hn::IfThenZeroElse(hn::Eq(n, zero), hn::Mul(hn::Sqrt(raised), factor)), d, rho + key + at);
      hn::StoreU(hn::Mul(hn::Sqrt(e), factor), d, rho_e + key + at);
    };
    store(n0, e0, 0), store(n1, e1, lanes), store(n2, e2, 2 * lanes);
  }
}

void norm_keys(const std::uint8_t* const* keys, int dim, float* HWY_RESTRICT rho, float* HWY_RESTRICT rho_e) {
  HWY_ALIGN float panel[kMaxKeyBytes * kPanelKeys];
  pack_panel(keys, dim, panel);
  norm_panel(panel, dim, rho, rho_e);
}

// --- Collecting survivors ---------------------------------------------------------------------------------------------------

// `keep` maps a vector of bounds to the mask of positions to collect; the tail is compared as scalars by `keep_one`.
template <class Keep, class KeepOne>
HWY_INLINE std::int64_t collect(const float* u, std::int64_t n, std::int32_t* out, const Keep& keep, const KeepOne& keep_one) {
  const F32 d;
  const I32 di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t count = 0;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto mask = keep(hn::LoadU(d, u + i));
    if (hn::AllFalse(d, mask)) continue;
    const auto ids = hn::Iota(di, static_cast<std::int32_t>(i));
    count += static_cast<std::int64_t>(hn::CompressBlendedStore(ids, hn::RebindMask(di, mask), di, out + count));
  }
  for (; i < n; ++i) {
    if (keep_one(u[i])) out[count++] = static_cast<std::int32_t>(i);
  }
  return count;
}

std::int64_t collect_at_least(const float* u, std::int64_t n, float low, std::int32_t* out) {
  const F32 d;
  const VF vlow = hn::Set(d, low);
  return collect(
      u, n, out, [&](VF v) HWY_ATTR { return hn::Not(hn::Lt(v, vlow)); }, [&](float v) { return !(v < low); });
}

std::int64_t collect_between(const float* u, std::int64_t n, float low, float high, std::int32_t* out) {
  const F32 d;
  const VF vlow = hn::Set(d, low), vhigh = hn::Set(d, high);
  return collect(
      u, n, out, [&](VF v) HWY_ATTR { return hn::AndNot(hn::Lt(v, vlow), hn::Lt(v, vhigh)); },
      [&](float v) { return !(v < low) && v < high; });
}

#if HWY_TARGET == HWY_AVX3_DL
#include "backend/cpu/kernels_i8-inl.hpp"
#endif

inline constexpr Kernels make_kernels(std::string_view name) {
  Kernels kernels{name,       pack_panel,       score_panel,     dot_panel, bound_panel, norm_keys,
                  norm_panel, collect_at_least, collect_between, nullptr,   nullptr,     nullptr};
#if HWY_TARGET == HWY_AVX3_DL
  kernels.norm_keys = norm_keys_i8;
  kernels.pack_panel_i8 = pack_panel_i8;
  kernels.pack_and_norm_panel_i8 = pack_and_norm_panel_i8;
  kernels.bound_panel_i8 = bound_panel_i8;
#endif
  return kernels;
}

#endif  // a target with fused multiply-add

}  // namespace dosa::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
