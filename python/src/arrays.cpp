#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <fmt/format.h>

#include "dosa/decode.hpp"
#include "errors.hpp"

namespace nb = nanobind;

namespace dosa::python {
namespace {

constexpr std::uint8_t kFloat8E4m3fn = 10;  // DLPack 1.1, kDLFloat8_e4m3fn

std::string name_of(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const char* kind = dtype.code == static_cast<std::uint8_t>(Code::Int)       ? "int"
                     : dtype.code == static_cast<std::uint8_t>(Code::UInt)    ? "uint"
                     : dtype.code == static_cast<std::uint8_t>(Code::Float)   ? "float"
                     : dtype.code == static_cast<std::uint8_t>(Code::Bfloat)  ? "bfloat"
                     : dtype.code == static_cast<std::uint8_t>(Code::Complex) ? "complex"
                     : dtype.code == static_cast<std::uint8_t>(Code::Bool)    ? "bool"
                                                                              : "another float";
  return fmt::format("{}{}", kind, dtype.bits);
}

DType dtype_of(const char* name, nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<std::uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  if (is(Code::UInt, 8) || is(Code::Int, 8) || (dtype.code == kFloat8E4m3fn && dtype.lanes == 1)) return DType::f8_e4m3;
  if (is(Code::Float, 32)) return DType::f32;
  if (is(Code::Int, 32)) return DType::i32;
  if (is(Code::Bfloat, 16)) return DType::bf16;
  refuse(fmt::format("{} has dtype {}; dosa knows float8_e4m3fn or uint8 for it, float32 and int32", name,
                     name_of(dtype)));
}

Device device_of(const char* name, int device) {
  switch (device) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value: return Device::cpu;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value: return Device::cuda;
    default:
      refuse(fmt::format("{} is on DLPack device type {}; allowed are CPU (1, 3) and CUDA (2, 13)", name, device));
  }
}

template <typename Void, typename Array>
BasicTensorView<Void> view_of(const char* name, const Array& array) {
  BasicTensorView<Void> view;
  const auto rank = static_cast<int>(array.ndim());
  if (rank == 0 || rank > view.max_rank) {
    refuse(fmt::format("{} has {} dimensions; allowed are 1 to {}", name, rank, view.max_rank));
  }
  view.data = array.data();
  view.dtype = dtype_of(name, array.dtype());
  view.device = device_of(name, array.device_type());
  view.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    view.shape[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(array.shape(static_cast<std::size_t>(axis)));
    view.stride[static_cast<std::size_t>(axis)] = array.stride(static_cast<std::size_t>(axis));
  }
  return view;
}

std::string type_name_of(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

}  // namespace

TensorView Arrays::input(const char* name, nb::handle array) {
  if (array.is_none()) return {};
  nb::ndarray<nb::ro> taken;
  if (!nb::try_cast(array, taken)) {
    refuse(fmt::format("{} is of type {}, which exports neither DLPack nor a buffer; cast FP8 arrays to uint8 views",
                       name, type_name_of(array)));
  }
  inputs_.push_back(std::move(taken));
  return view_of<const void>(name, inputs_.back());
}

MutableTensorView Arrays::output(const char* name, nb::handle array) {
  if (array.is_none()) return {};
  nb::ndarray<> taken;
  if (!nb::try_cast(array, taken)) {
    refuse(fmt::format("{} is of type {} and is read-only or exports no DLPack; outputs are written in place", name,
                       type_name_of(array)));
  }
  outputs_.push_back(std::move(taken));
  return view_of<void>(name, outputs_.back());
}

Problem Arrays::problem(const nb::tuple& arrays, std::int32_t topk) {
  Problem problem;
  problem.q = input("q", arrays[0]);
  problem.k = input("k", arrays[1]);
  problem.k_scale = input("k_scale", arrays[2]);
  problem.w = input("w", arrays[3]);
  problem.ks = input("ks", arrays[4]);
  problem.ke = input("ke", arrays[5]);
  problem.hints = input("hints", arrays[6]);
  problem.kv_cache = input("kv_cache", arrays[7]);
  problem.block_table = input("block_table", arrays[8]);
  problem.requests = input("requests", arrays[9]);
  problem.topk = topk;
  if (problem.kv_cache.present()) return paged(problem);
  if (problem.q.rank != 3) refuse(fmt::format("q has {} dimensions; it must be [queries, heads, dim]", problem.q.rank));
  if (problem.k.rank != 2) refuse(fmt::format("k has {} dimensions; it must be [keys, dim]", problem.k.rank));
  return problem;
}

// q [B, next_n, heads, dim] is a step of decoding: its queries become rows.
Problem Arrays::paged(const Problem& given) {
  if (given.kv_cache.rank != 4) {
    refuse(fmt::format("kv_cache has {} dimensions; it must be [pages, page_size, 1, dim + 4]", given.kv_cache.rank));
  }
  if (given.block_table.rank != 2) {
    refuse(fmt::format("block_table has {} dimensions; it must be [requests, max_blocks]", given.block_table.rank));
  }
  if (given.q.rank == 3) return given;
  if (given.q.rank != 4) {
    refuse(fmt::format("q has {} dimensions; it must be [B, next_n, heads, dim] or [queries, heads, dim]", given.q.rank));
  }
  Problem problem = value_of(decode_problem({.q = given.q,
                                             .w = given.w,
                                             .kv_cache = given.kv_cache,
                                             .block_table = given.block_table,
                                             .context_lens = given.ke,
                                             .topk = given.topk}));
  problem.ks = given.ks;
  problem.hints = given.hints;
  problem.requests = given.requests;
  return problem;
}

nb::object to_numpy(const TensorView& view, nb::handle owner) {
  if (!view.present()) return nb::none();
  const nb::dlpack::dtype dtype = view.dtype == DType::f32   ? nb::dtype<float>()
                                  : view.dtype == DType::i32 ? nb::dtype<std::int32_t>()
                                                             : nb::dtype<std::uint8_t>();
  std::array<std::size_t, TensorView::max_rank> shape{};
  for (std::size_t axis = 0; axis < shape.size(); ++axis) shape[axis] = static_cast<std::size_t>(view.shape[axis]);
  return nb::cast(nb::ndarray<nb::numpy, nb::ro>(view.data, static_cast<std::size_t>(view.rank), shape.data(), owner,
                                                 view.stride.data(), dtype));
}

}  // namespace dosa::python
