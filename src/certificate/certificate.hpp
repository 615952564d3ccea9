// THE inequality: an upper bound of a key's score from few rows.
//
// certificate.md beside this file derives it, rounding included.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/mutation.hpp"
#include "certificate/heads.hpp"
#include "dosa/options.hpp"

namespace dosa {

inline constexpr int kMaxBoundRows = 64;

/// What a certificate is made from: chosen by the plan from predicted work, valid whatever it says.
struct CertificateChoice {
  Form form = Form::extended;
  int retained = 0;    // retained heads, capped at the heads of non-zero weight
  int aggregates = 1;  // groups of omitted negative heads (base form); the linear forms have one vector
  Ablation ablation = Ablation::none;

  friend bool operator==(const CertificateChoice&, const CertificateChoice&) = default;
};

/// A certificate. The reference score of every key i that is not exempt obeys
///
///   s_ref(i) <= fl(alpha_i * u_i),   u = fl(c * rho_i);  for each row j in order:  u = fma(weight_j, act_j(row_j .
///   k_i), u)
///
/// all in f32, dots as f32 FMA chains over the components from +0. act is [.]+ for relu rows and the identity for
/// linear ones. Rows [0, retained) are heads (exact E4M3 values), the others auxiliary: f32 vectors near sum_h
/// aux_share[a][h] q_h. rho_i sqrt(dim) >= max(||k_i||, 2^-6), rho_i = 0 for a zero key; c carries the factor
/// sqrt(dim). Every allowance (the reference scorer's rounding, the screen's own, rounding of the rows) is inside c and
/// weight.
struct Certificate {
  bool exempt = false;  // no certificate: the row must be scored in full
  Form form = Form::base;
  int retained = 0;
  int rows = 0;                                    // retained + auxiliary
  int linear_rows = 0;                             // the last linear_rows rows are linear, all others relu
  std::array<std::int16_t, kMaxBoundRows> head{};  // of row j < retained
  std::array<float, kMaxBoundRows> weight{};
  std::array<std::array<float, kMaxHeads>, kMaxAggregates> aux_share{};  // of row retained + a
  float c = 0;
};

/// Share of the derived allowances that goes into a certificate. Anything below 1 is wrong: tests that must fail when
/// the allowances are missing set it to 0.
struct Allowances {
  double scale = mutated(Mutation::no_allowances) ? 0 : 1;
};

/// Builds the certificate of one query from the first heads of a ranking. `aux_rows` has room for kMaxAggregates * dim
/// floats and receives (rows - retained) * dim of them. Exempt if q, w or anything derived is not finite, or sum |w_h|
/// ||q_h|| > 2^60, or form is absolute and a positive head would be omitted. Cost: about 5 us for 32 heads, 10 us
/// for 64.
Certificate build_certificate(const QueryHeads& query, const HeadRanking& ranking, const CertificateChoice& choice,
                              const PanelDots& panel, std::span<float> aux_rows, const Allowances& allowances = {});

/// The same with the query's own ranking.
Certificate build_certificate(const QueryHeads& query, const CertificateChoice& choice, const PanelDots& panel,
                              std::span<float> aux_rows, const Allowances& allowances = {});

/// u of one key as the screen computes it, in plain scalar code: the definition that every screen kernel must reproduce
/// bit for bit. `rows` is [certificate.rows, dim].
float bound_reference(const Certificate& certificate, std::span<const float> rows, std::span<const float> key,
                      float rho);

/// Predicted u of every panel key, from the dots alone (no allowance for rounding: for statistics, never for
/// rejection).
void predict_bounds(const Certificate& certificate, const PanelDots& panel, std::span<const float> rho,
                    std::span<float> u);

}  // namespace dosa
