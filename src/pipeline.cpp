// START HERE: the main path of one group of queries.
//
//   seed      witnesses scored in full                        -> tau, a proven lower bound of the K-th best score
//   certify   few rows per query that bound every score       -> certificates
//   screen    bound < tau: the key cannot win                 -> survivors
//   refine    survivors scored in full, tau rises             -> records
//   select    the K first records in the total order          -> ids
#include "backend/backend.hpp"

namespace dosa {

void select_group(QueryGroup& group) {
  group.seed();
  group.certify();
  while (group.next_slice()) {
    group.screen();
    group.refine();
  }
  group.score_in_full();
  group.select();
}

}  // namespace dosa
