// Where text goes: results to stdout, one-line errors and progress to stderr.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "dosa/result.hpp"

namespace dosa::cli {

/// The exit codes of the program.
enum ExitCode : int { kOk = 0, kDifference = 1, kBadInput = 2, kUnsupported = 3, kOurBug = 70 };

ExitCode exit_code_of(ErrorCode code) noexcept;

/// "dosa: message" on stderr, on one line whatever the message holds.
void print_error(std::string_view message);

/// A line on a terminal's stderr while a long piece of work runs: what, how far, how long. Writes nothing elsewhere,
/// nor in the first second.
class Progress {
 public:
  /// total 0: no count is shown.
  explicit Progress(std::string what, std::int64_t total = 0);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance() noexcept { ++done_; }

 private:
  void tick(const std::stop_token& stop) const;

  std::string what_;
  std::int64_t total_;
  std::atomic<std::int64_t> done_ = 0;
  std::jthread ticker_;
};

}  // namespace dosa::cli
