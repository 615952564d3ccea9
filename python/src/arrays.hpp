// Arrays of any framework as views, through DLPack; nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <vector>

#include "dosa/problem.hpp"
#include "dosa/result.hpp"

namespace dosa::python {

/// The arrays of one call, kept alive as long as it runs. Errors name the array.
class Arrays {
 public:
  /// None is absent. uint8 and int8 are taken as FP8.
  TensorView input(const char* name, nanobind::handle array);
  /// The same, but the array must be writable.
  MutableTensorView output(const char* name, nanobind::handle array);

  /// (q, k, k_scale, w, ks, ke, hints, kv_cache, block_table, requests)
  Problem problem(const nanobind::tuple& arrays, std::int32_t topk);

 private:
  static Problem paged(const Problem& given);

  std::vector<nanobind::ndarray<nanobind::ro>> inputs_;
  std::vector<nanobind::ndarray<>> outputs_;
};

/// A read-only NumPy array over a host view; `owner` keeps the memory. Absent: None.
nanobind::object to_numpy(const TensorView& view, nanobind::handle owner);

}  // namespace dosa::python
