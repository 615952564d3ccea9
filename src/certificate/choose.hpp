// Choosing a certificate from predicted work.
//
//   work relative to dense = rows * row_cost + survivors * survivor_cost + fixed
//
// (mathematics.md's cost model; seeds are refined keys here, because the largest bounds are scored first.) One more row
// pays only if it rejects more than row_cost / survivor_cost further keys.
#pragma once

#include <cstdint>
#include <span>

#include "certificate/certificate.hpp"

namespace dosa {

/// Prices in units of one dense query-key pair.
struct WorkPrices {
  double row = 0;         ///< one bound row against one key
  double survivor = 0;    ///< one gathered key scored in full
  double fixed = 0;       ///< per key: storing and comparing a bound
  int aux_rows_factor = 1;  ///< rows that an auxiliary vector of a linear form costs (2 where rows are integers)
  int row_multiple = 1;   ///< budgets are multiples of this
};

/// One sampled query.
struct PanelQuery {
  QueryHeads query;
  PanelDots dots;
  std::span<const float> rho;    // [keys]
  std::span<const float> alpha;  // [keys] as the screen uses them
  float tau = 0;                 // panel score at rank K / N
};

struct PredictedWork {
  double rows = 0;
  double survivors = 0;  // share of visible keys
  double total = 0;      // relative to dense
};

/// Work that `choice` would cost this query. `u` is scratch [keys], `aux` kMaxAggregates * dim.
PredictedWork predict_work(const PanelQuery& sample, const CertificateChoice& choice, const WorkPrices& prices,
                           std::span<float> u, std::span<float> aux);

/// Rows that a certificate costs under `prices` (rounded up to the multiple a kernel takes).
int priced_rows(const Certificate& certificate, const WorkPrices& prices);

}  // namespace dosa
