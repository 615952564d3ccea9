// Integer screening kernels (AVX-512 VNNI and VBMI). Included by kernels-inl.hpp inside its namespace.

// Of every E4M3 magnitude |v|: round(|v| / 4), and the rest |v| - 4 round(|v| / 4) in units of 2^-5, rounded up. Where the quarter
// is not zero, |v| > 2 and the rest is a multiple of 1/4 already: only magnitudes below 1/4 are rounded. NaN bytes get a quarter of
// 120, which no number has; their keys are exempt.
struct alignas(64) MagnitudeTables {
  std::uint8_t quarter[128];
  std::int8_t rest[128];
};
inline constexpr int kNanQuarter = 120;
inline constexpr MagnitudeTables kMagnitudeTables = [] {
  MagnitudeTables tables{};
  for (int byte = 0; byte < 128; ++byte) {
    const int exponent = byte >> 3;
    const int mantissa = byte & 7;
    // The value in units of 2^-9, then to units of 4 = 2^11, ties to even.
    const std::int64_t units = exponent == 0 ? mantissa : static_cast<std::int64_t>(8 + mantissa) << (exponent - 1);
    const std::int64_t floor = units >> 11;
    const std::int64_t above = units & 2047;
    const std::int64_t quarter = floor + (above > 1024 || (above == 1024 && (floor & 1) != 0) ? 1 : 0);
    tables.quarter[byte] = static_cast<std::uint8_t>(quarter);
    tables.rest[byte] = static_cast<std::int8_t>((units - (quarter << 11) + 15) >> 4);
  }
  return tables;
}();
static_assert(kMagnitudeTables.quarter[0x7F] == kNanQuarter && kMagnitudeTables.quarter[0x7E] < kNanQuarter);
static_assert(kMagnitudeTables.quarter[0x3F] == 0 && kMagnitudeTables.quarter[0x41] > 0);

// Highway 1.0.3 checks the CPU for these at this target but does not enable them in the compiler. Its own list is repeated
// because clang lets a function's attribute replace that of the namespace.
#define DOSA_I8_ATTR __attribute__((target(HWY_TARGET_STR ",avx512vnni,avx512vbmi")))

// Norms from bytes. With m = 4 q + r / 32 of every component, q and r from the tables, m >= |k| and |r / 32| >= |k - 4 k8|, and
//
//   sum m^2 = 16 sum q^2 + 1/4 sum q r + 2^-10 sum r^2
//
// whose three sums are below 2^24 in size: exact, and so are their floats. Where q > 0, |r / 32| <= 2 q, so the last two terms sum
// to at most 3 times the result: rounding them, and the result, loses 2^-22 of it, less than the chain that norm_factor allows for.
// A key that is not zero has some m >= 2^-5, above the least norm of 2^-6.
//
// kPack: quarters with their signs, and 128 added, to `panel`; kNorms: norms to `rho` and `rho_e`. A decode step needs both of each
// key, once.
template <bool kPack, bool kNorms>
DOSA_I8_ATTR HWY_INLINE void read_keys_i8(const std::uint8_t* const* keys, int dim, std::uint32_t* HWY_RESTRICT panel,
                                          float* HWY_RESTRICT rho, float* HWY_RESTRICT rho_e) {
  // Lookups take the low six bits of each byte; below 2 every quarter is 0.
  const __m512i quarters = _mm512_load_si512(kMagnitudeTables.quarter + 64);
  const __m512i rest_low = _mm512_load_si512(kMagnitudeTables.rest);
  const __m512i rest_high = _mm512_load_si512(kMagnitudeTables.rest + 64);
  const __m512i zero_point = _mm512_set1_epi8(-128);
  const F32 d;
  const VF factor = hn::Set(d, norm_factor(dim)), unit = hn::Set(d, 0x1p-10F);
  for (int key = 0; key < kPanelKeys; key += 16) {
    __m512i qq = _mm512_setzero_si512(), qr = qq, rr = qq, largest = qq;
    for (int column = 0; column < dim; column += kColumn) {
      hn::Vec<U32> quads[kColumn / 4];
      transpose_quads(keys + key, column, quads);
      for (int word = 0; word < kColumn / 4; ++word) {
        const __m512i bytes = quads[word].raw;
        const __mmask64 upper = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(64));
        const __m512i q = _mm512_maskz_permutexvar_epi8(upper, bytes, quarters);
        if constexpr (kPack) {
          const __m512i centred = _mm512_add_epi8(zero_point, q);
          _mm512_storeu_si512(panel + (column / 4 + word) * kPanelKeys + key,
                              _mm512_mask_sub_epi8(centred, _mm512_movepi8_mask(bytes), zero_point, q));
        }
        if constexpr (kNorms) {
          const __m512i low = _mm512_permutexvar_epi8(bytes, rest_low);
          const __m512i r = _mm512_mask_permutexvar_epi8(low, upper, bytes, rest_high);
          const __m512i size = _mm512_abs_epi8(r);
          qq = _mm512_dpbusd_epi32(qq, q, q), qr = _mm512_dpbusd_epi32(qr, q, r), rr = _mm512_dpbusd_epi32(rr, size, size);
          largest = _mm512_max_epu8(largest, q);
        }
      }
    }
    if constexpr (kNorms) {
      const VF rest = hn::Mul(unit, VF{_mm512_cvtepi32_ps(rr)});
      const VF square = hn::MulAdd(hn::Set(d, 16.0F), VF{_mm512_cvtepi32_ps(qq)},
                                   hn::MulAdd(hn::Set(d, 0.25F), VF{_mm512_cvtepi32_ps(qr)}, rest));
      const __m512i nan_bytes = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(kNanQuarter)));
      const VF norm = hn::Mul(hn::Sqrt(square), factor);
      hn::StoreU(VF{_mm512_mask_blend_ps(_mm512_test_epi32_mask(nan_bytes, nan_bytes), norm.raw, hn::NaN(d).raw)}, d, rho + key);
      hn::StoreU(hn::Mul(hn::Sqrt(rest), factor), d, rho_e + key);
    }
  }
}

DOSA_I8_ATTR void pack_panel_i8(const std::uint8_t* const* keys, int dim, std::uint32_t* HWY_RESTRICT panel) {
  read_keys_i8<true, false>(keys, dim, panel, nullptr, nullptr);
}

DOSA_I8_ATTR void norm_keys_i8(const std::uint8_t* const* keys, int dim, float* HWY_RESTRICT rho, float* HWY_RESTRICT rho_e) {
  read_keys_i8<false, true>(keys, dim, nullptr, rho, rho_e);
}

DOSA_I8_ATTR void pack_and_norm_panel_i8(const std::uint8_t* const* keys, int dim, std::uint32_t* HWY_RESTRICT panel,
                                         float* HWY_RESTRICT rho, float* HWY_RESTRICT rho_e) {
  read_keys_i8<true, true>(keys, dim, panel, rho, rho_e);
}

DOSA_I8_ATTR void bound_panel_i8(const IntegerBoundArgs& args, float* HWY_RESTRICT bounds) {
  static_assert(kPanelKeys == 3 * 16 && kRowGroup == 4);
  const F32 d;
  const int relu_rows = args.rows - args.linear_rows;
  const VF c = hn::Set(d, args.c), c_e = hn::Set(d, args.c_e);
  const auto start = [&](int key) DOSA_I8_ATTR {
    return hn::MulAdd(c_e, hn::LoadU(d, args.rho_e + key), hn::Mul(c, hn::LoadU(d, args.rho + key)));
  };
  BoundChunk u{start(0), start(16), start(32)};
  for (int row = 0; row < args.rows; row += kRowGroup) {
    const std::int32_t* offset = args.offset + row;
    __m512i a00 = _mm512_set1_epi32(offset[0]), a01 = a00, a02 = a00;
    __m512i a10 = _mm512_set1_epi32(offset[1]), a11 = a10, a12 = a10;
    __m512i a20 = _mm512_set1_epi32(offset[2]), a21 = a20, a22 = a20;
    __m512i a30 = _mm512_set1_epi32(offset[3]), a31 = a30, a32 = a30;
    const std::uint32_t* q = args.row_data + row * (args.dim / 4);
    for (int word = 0; word < args.dim / 4; ++word, q += kRowGroup) {
      const std::uint32_t* k = args.panel + word * kPanelKeys;
      const __m512i k0 = _mm512_loadu_si512(k), k1 = _mm512_loadu_si512(k + 16), k2 = _mm512_loadu_si512(k + 32);
      __m512i b = _mm512_set1_epi32(static_cast<int>(q[0]));
      a00 = _mm512_dpbusd_epi32(a00, k0, b), a01 = _mm512_dpbusd_epi32(a01, k1, b), a02 = _mm512_dpbusd_epi32(a02, k2, b);
      b = _mm512_set1_epi32(static_cast<int>(q[1]));
      a10 = _mm512_dpbusd_epi32(a10, k0, b), a11 = _mm512_dpbusd_epi32(a11, k1, b), a12 = _mm512_dpbusd_epi32(a12, k2, b);
      b = _mm512_set1_epi32(static_cast<int>(q[2]));
      a20 = _mm512_dpbusd_epi32(a20, k0, b), a21 = _mm512_dpbusd_epi32(a21, k1, b), a22 = _mm512_dpbusd_epi32(a22, k2, b);
      b = _mm512_set1_epi32(static_cast<int>(q[3]));
      a30 = _mm512_dpbusd_epi32(a30, k0, b), a31 = _mm512_dpbusd_epi32(a31, k1, b), a32 = _mm512_dpbusd_epi32(a32, k2, b);
    }
    const auto add = [&](int r, __m512i x0, __m512i x1, __m512i x2) DOSA_I8_ATTR {
      if (row + r >= args.rows) return;
      u.add(d, VF{_mm512_cvtepi32_ps(x0)}, VF{_mm512_cvtepi32_ps(x1)}, VF{_mm512_cvtepi32_ps(x2)}, args.weight[row + r],
            row + r >= relu_rows);
    };
    add(0, a00, a01, a02), add(1, a10, a11, a12), add(2, a20, a21, a22), add(3, a30, a31, a32);
  }
  u.store(d, args.alpha, bounds);
}
