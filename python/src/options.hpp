// Options from Python's keyword arguments, in the words of the command line.
#pragma once

#include <nanobind/nanobind.h>
#include <string>

#include "dosa/options.hpp"
#include "io/names.hpp"

namespace dosa::python {

/// Options whose implementation name lives in `implementation`, which must stay where it is.
struct OwnedOptions {
  Options options;
  std::string implementation;
};

/// Sets what `given` names, leaves the rest at its default.
void set_options(OwnedOptions& owned, const nanobind::dict& given);

ReferenceScorer reference_of(const std::string& word);
Order order_of(const std::string& word);
IndexSpace index_space_of(const std::string& word);
Backend backend_of(const std::string& word);

}  // namespace dosa::python
