// The certificate in integers: for CPUs whose u8 x i8 dot products are several times faster than f32 chains.
//
// Derivation: certificate.md, section 6.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "certificate/certificate.hpp"

namespace dosa {

/// Every component of a key or head in steps of 4, to nearest, ties to even; |.| <= 112. Values of magnitude 32 and
/// more are multiples of 4, so nothing is lost there. NaN bytes give 120 (such keys are exempt).
std::int8_t quarter_e4m3(std::uint8_t byte) noexcept;

/// A certificate whose rows are integers. With k8 the key in steps of 4, the reference score of every key that is not
/// exempt obeys
///
///   s_ref(i) <= fl(alpha_i * u_i),   u = fma(c_e, rho_e_i, fl(c * rho_i));
///                                    for each row j in order:  u = fma(weight_j, act_j(float(row_j . k8_i)), u)
///
/// in f32; the integer dots are below 2^24, so float() is exact. rho is as in Certificate; rho_e sqrt(dim) >= ||k - 4
/// k8||, 0 if every component is a multiple of 4.
struct IntegerCertificate {
  bool exempt = false;  // no certificate
  int rows = 0;
  int linear_rows = 0;  // the last linear_rows rows are linear, all others relu
  std::array<float, kMaxBoundRows> weight{};
  float c = 0;
  float c_e = 0;
};

/// Rounds a certificate's rows to integers, one for one, and bounds what that loses. `rows` has room for kMaxBoundRows
/// * dim and receives [result.rows, dim]. Exempt if the certificate is, or if a number overflows. Cost: about 10 us for
/// 16 rows; grows with rows^2.
IntegerCertificate make_integer(const Certificate& certificate, const QueryHeads& query,
                                std::span<const float> aux_rows, std::span<std::int8_t> rows,
                                const Allowances& allowances = {});

/// u of one key in plain scalar code: the definition that integer kernels must reproduce bit for bit. `rows` is
/// [certificate.rows, dim], `key` is k8.
float bound_reference(const IntegerCertificate& certificate, std::span<const std::int8_t> rows,
                      std::span<const std::int8_t> key, float rho, float rho_e);

/// Predicted u of every panel key from the f32 dots, as predict_bounds (for statistics, never for rejection).
void predict_bounds(const Certificate& certificate, const IntegerCertificate& integer, const PanelDots& panel,
                    std::span<const float> rho, std::span<const float> rho_e, std::span<float> u);

}  // namespace dosa
