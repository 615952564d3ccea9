// Choosing a certificate from predicted work.
//
//   work relative to dense = rows * row price + survivors * survivor price + fixed
//
// (the cost model of mathematics.md; there are no seeds in it because the largest bounds are scored first). One more row pays
// only if it rejects more than row / survivor further keys, so the best budget differs by layer and is taken from the data:
// sampled queries against sampled keys.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "certificate/certificate.hpp"
#include "certificate/integer_screen.hpp"

namespace dosa {

/// One way to screen: what a certificate is made from, and in which arithmetic it is evaluated.
struct CertificatePlan {
  CertificateChoice choice;
  ScreenPrecision precision = ScreenPrecision::f32;

  friend bool operator==(const CertificatePlan&, const CertificatePlan&) = default;
};

/// Prices in units of one dense query-key pair.
struct WorkPrices {
  double row = 0;       ///< one bound row against one key
  double survivor = 0;  ///< one gathered key scored in full
  double fixed = 0;     ///< per key, whatever the certificate: packing, storing and comparing
};

struct PriceList {
  WorkPrices f32;
  WorkPrices i8;
  bool has_i8 = false;
  int row_multiple = 1;  ///< a kernel takes rows in groups of this many
};

/// One sampled query and the sampled keys.
struct SampledQuery {
  QueryHeads query;
  PanelDots dots;
  HeadRanking ranking;
  std::span<const float> alpha;  // [dots.keys] as the screen uses them
  std::span<const float> rho_e;  // [dots.keys]; only with i8
  float tau = 0;                 // the score at rank K of N, as the sample shows it
};

struct PredictedWork {
  double rows = 0;
  double survivors = 0;  ///< share of visible keys
  double total = 0;      ///< relative to dense
};

/// Arrays that predictions write to.
struct PredictionScratch {
  std::span<float> u;                  // [keys]
  std::span<float> aux;                // [kMaxAggregates * dim]
  std::span<std::int8_t> integer_rows;  // [kMaxBoundRows * dim]; only with i8
};

PredictedWork predict_work(const SampledQuery& sample, const CertificatePlan& plan, const PriceList& prices,
                           const PredictionScratch& scratch);

struct ChosenCertificate {
  CertificatePlan plan;
  PredictedWork work;  // mean over the samples
};

/// The cheapest plan that `wanted` allows, found by climbing from `start`: rows up and down, then the other forms there.
ChosenCertificate choose_certificate(std::span<const SampledQuery> samples, const CertificateOptions& wanted,
                                     const PriceList& prices, const CertificatePlan& start, const PredictionScratch& scratch);

}  // namespace dosa
