#include "console.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <unistd.h>

#include <fmt/format.h>

namespace dosa::cli {

ExitCode exit_code_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::memory_budget:
    case ErrorCode::io:
    case ErrorCode::bad_file: return kBadInput;
    case ErrorCode::unsupported_shape:
    case ErrorCode::unsupported_device: return kUnsupported;
    case ErrorCode::verification_failed: return kDifference;
    case ErrorCode::workspace_too_small: break;  // the program sizes its own workspaces
  }
  return kOurBug;
}

void print_error(std::string_view message) {
  std::string line(message.substr(0, message.find_last_not_of('\n') + 1));
  std::ranges::replace(line, '\n', ' ');
  fmt::print(stderr, "dosa: {}\n", line);
}

Progress::Progress(std::string what, std::int64_t total) : what_(std::move(what)), total_(total) {
  if (::isatty(STDERR_FILENO) != 0) ticker_ = std::jthread([this](const std::stop_token& stop) { tick(stop); });
}

Progress::~Progress() {
  ticker_.request_stop();
  if (ticker_.joinable()) ticker_.join();
}

void Progress::tick(const std::stop_token& stop) const {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  bool written = false;
  while (!wake.wait_for(lock, stop, std::chrono::seconds(1), [&] { return stop.stop_requested(); })) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
    const std::string count = total_ > 0 ? fmt::format(" {}/{}", done_.load(), total_) : "";
    fmt::print(stderr, "\r\033[K{}{} {} s", what_, count, seconds);
    std::fflush(stderr);
    written = true;
  }
  if (written) fmt::print(stderr, "\r\033[K");
}

}  // namespace dosa::cli
