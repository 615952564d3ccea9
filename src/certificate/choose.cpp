#include "certificate/choose.hpp"

namespace dosa {

int priced_rows(const Certificate& certificate, const WorkPrices& prices) {
  const int rows = certificate.rows + certificate.linear_rows * (prices.aux_rows_factor - 1);
  return (rows + prices.row_multiple - 1) / prices.row_multiple * prices.row_multiple;
}

PredictedWork predict_work(const PanelQuery& sample, const CertificateChoice& choice, const WorkPrices& prices,
                           std::span<float> u, std::span<float> aux) {
  const Certificate certificate = build_certificate(sample.query, choice, sample.dots, aux);
  if (certificate.exempt) return {0, 1, 1};
  predict_bounds(certificate, sample.dots, sample.rho, u);
  int survivors = 0;
  for (int i = 0; i < sample.dots.keys; ++i) {
    survivors += sample.alpha[static_cast<std::size_t>(i)] * u[static_cast<std::size_t>(i)] < sample.tau ? 0 : 1;
  }
  PredictedWork work;
  work.rows = priced_rows(certificate, prices);
  work.survivors = static_cast<double>(survivors) / sample.dots.keys;
  work.total = work.rows * prices.row + work.survivors * prices.survivor + prices.fixed;
  return work;
}

}  // namespace dosa
