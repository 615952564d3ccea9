#include "options.hpp"

#include <nanobind/stl/string.h>

#include <fmt/format.h>

#include "errors.hpp"

namespace nb = nanobind;

namespace dosa::python {
namespace {

/// The value that a table gives a word; the error names the allowed words.
template <typename Value, std::size_t N>
Value choice(const char* what, const std::array<Named<Value>, N>& words, const std::string& word) {
  std::string allowed;
  for (const auto& entry : words) {
    if (entry.name == word) return entry.value;
    allowed += allowed.empty() ? "" : ", ";
    allowed += entry.name;
  }
  refuse(fmt::format("{} is '{}'; allowed are {}", what, word, allowed));
}

template <typename Number>
Number number(const std::string& name, nb::handle value) {
  Number number;
  if (!nb::try_cast(value, number)) {
    refuse(fmt::format("{} is {}; it must be an integer", name, nb::cast<std::string>(nb::repr(value))));
  }
  return number;
}

}  // namespace

void set_options(OwnedOptions& owned, const nb::dict& given) {
  Options& options = owned.options;
  CertificateOptions& certificate = options.certificate;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    const auto word = [&] {
      std::string text;
      if (!nb::try_cast(value, text)) {
        refuse(fmt::format("{} is {}; it must be a word", name, nb::cast<std::string>(nb::repr(value))));
      }
      return text;
    };
    if (name == "method") {
      options.method = choice("method", kMethods, word());
    } else if (name == "backend") {
      options.backend = backend_of(word());
    } else if (name == "form") {
      certificate.form = choice("form", kForms, word());
    } else if (name == "row_budget") {
      certificate.row_budget = number<std::int32_t>(name, value);
    } else if (name == "aggregates") {
      certificate.aggregates = number<std::int32_t>(name, value);
    } else if (name == "precision") {
      certificate.precision = choice("precision", kPrecisions, word());
    } else if (name == "ablation") {
      certificate.ablation = choice("ablation", kAblations, word());
    } else if (name == "seeds") {
      options.seeds = choice("seeds", kSeedPolicies, word());
    } else if (name == "order") {
      options.order = order_of(word());
    } else if (name == "index_space") {
      options.index_space = index_space_of(word());
    } else if (name == "threads") {
      options.threads = number<std::int32_t>(name, value);
    } else if (name == "implementation") {
      owned.implementation = word();
      options.implementation = owned.implementation;
    } else if (name == "memory_budget") {
      options.memory_budget = number<std::int64_t>(name, value);
    } else if (name == "min_context") {
      options.min_context = number<std::int64_t>(name, value);
    } else if (name == "verify_rows") {
      options.verify_rows = number<std::int64_t>(name, value);
    } else if (name == "time_stages") {
      if (!nb::try_cast(value, options.time_stages)) {
        refuse(fmt::format("time_stages is {}; it must be True or False", nb::cast<std::string>(nb::repr(value))));
      }
    } else {
      refuse(fmt::format("there is no option '{}'", name));
    }
  }
}

ReferenceScorer reference_of(const std::string& word) { return choice("reference", kReferences, word); }
Order order_of(const std::string& word) { return choice("order", kOrders, word); }
IndexSpace index_space_of(const std::string& word) { return choice("index_space", kIndexSpaces, word); }
Backend backend_of(const std::string& word) { return choice("backend", kBackends, word); }

}  // namespace dosa::python
