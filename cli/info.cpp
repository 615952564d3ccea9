#include <fmt/format.h>

#include "commands.hpp"
#include "console.hpp"
#include "io/names.hpp"
#include "run.hpp"

namespace dosa::cli {

Result<int> info(bool json) {
  const auto implementations = cpu_implementations();
  if (json) {
    std::vector<JsonObject> backends;
    for (const auto& [name, backend] : kBackends) {
      const std::string reason = unavailable_reason(backend);
      backends.push_back(JsonObject());
      backends.back().add("name", name).add("available", reason.empty()).add("reason", reason);
    }
    JsonObject line("info");
    line.add("version", version())
        .add("threads", usable_cpus())
        .add("cpu_implementations", std::span<const std::string>(implementations))
        .add("backends", std::span<const JsonObject>(backends));
    fmt::print("{}\n", line.line());
    return kOk;
  }
  fmt::print("dosa {}\n", version());
  for (const auto& [name, backend] : kBackends) {
    const std::string reason = unavailable_reason(backend);
    fmt::print("backend {:6} {}\n", name, reason.empty() ? "available" : "not available: " + reason);
  }
  fmt::print("cpu implementations, fastest first: {}\n", fmt::join(implementations, ", "));
  fmt::print("cpus this process may use: {}\n", usable_cpus());
  return kOk;
}

}  // namespace dosa::cli
