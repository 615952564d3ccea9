// The verbs of the program. Each prints its result and returns an exit code, or an error for main to print.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dosa/options.hpp"
#include "dosa/result.hpp"
#include "score/reference.hpp"

namespace dosa::cli {

struct SelectArgs {
  std::string trace;
  std::int32_t topk = 2048;
  Options options;
  std::string out;  ///< empty: print a summary
  bool json = false;
};

struct VerifyArgs {
  std::vector<std::string> traces;
  std::vector<std::int32_t> topk = {2048};
  Options options;
  std::int64_t rows = 0;  ///< compared with the oracle, evenly spread; 0: all
  ReferenceScorer reference = ReferenceScorer::cpu;
  bool json = false;
};

struct BenchArgs {
  std::vector<std::string> traces;
  std::vector<std::int32_t> topk = {2048};
  std::vector<Method> methods;  ///< empty: all that the backend has
  Options options;
  std::int32_t repeats = 7;
  std::int64_t queries = 0;     ///< the last queries of the trace only; 0: all
  std::string case_id, commit;  ///< copied into the JSON line
  bool json = false;
};

struct ExplainArgs {
  std::vector<std::string> traces;
  std::vector<std::int32_t> topk = {2048};
  Options options;
  std::int64_t rows = 8;  ///< looked into, evenly spread; 0: all
  double share = 0.73;    ///< of the prefill time that goes to the indexer; GLM-5.2 at a million tokens
  bool audit = false;
  bool json = false;
};

struct RandomArgs {
  std::int32_t heads = 32, dim = 128;
  std::int64_t keys = 65536, queries = 128;
  double positive = 0.3;     ///< share of heads with a positive weight
  double correlation = 0.5;  ///< of heads and keys with one direction that all share
  std::uint64_t seed = 1;
};

struct AdversarialArgs {
  std::string name;
  std::int64_t keys = 8192, queries = 4;
  std::int32_t heads = 8;
};

struct ScoresArgs {
  std::string inline_scores;  ///< separated by commas or white space
  std::string file;           ///< the same from a text file
  std::int64_t queries = 1;
};

struct ExtendArgs {
  std::string trace;
  std::int64_t keys = 0;
  double jitter = 0.1;  ///< noise relative to the root mean square of a key's components
  std::uint64_t seed = 1;
};

struct DecodeArgs {
  std::string trace;
  std::int64_t requests = 1, next_n = 1, page_size = 64;
  std::uint64_t seed = 1;
};

Result<int> select(const SelectArgs& args);
Result<int> verify(const VerifyArgs& args);
Result<int> bench(const BenchArgs& args);
Result<int> explain(const ExplainArgs& args);
Result<int> info(bool json);

Result<int> synth_random(const RandomArgs& args, const std::string& out);
Result<int> synth_adversarial(const AdversarialArgs& args, const std::string& out);
Result<int> synth_scores(const ScoresArgs& args, const std::string& out);
Result<int> synth_extend(const ExtendArgs& args, const std::string& out);
Result<int> synth_decode(const DecodeArgs& args, const std::string& out);
/// Names that synth_adversarial takes, with a line about each.
std::vector<std::pair<std::string, std::string>> adversarial_names();

}  // namespace dosa::cli
