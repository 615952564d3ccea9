#include "io/trace.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "base/check.hpp"
#include "base/error.hpp"
#include "dosa/decode.hpp"

namespace dosa {
namespace {

std::string_view file_name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f8_e4m3: return "F8_E4M3";
    case DType::bf16: return "BF16";
    case DType::f32: return "F32";
    case DType::i32: return "I32";
  }
  return "?";
}

/// Takes tensors out of a file and checks dtype and rank. Keeps the first complaint, so that callers check once.
class Reader {
 public:
  explicit Reader(const Safetensors& file) : file_(file) {}

  /// Absent stays absent.
  TensorView optional(std::string_view name, DType dtype, int rank) {
    const StoredTensor* stored = file_.find(name);
    if (stored == nullptr) return {};
    const bool bytes = dtype == DType::f8_e4m3;
    if (stored->dtype != file_name_of(dtype) && !(bytes && stored->dtype == "U8")) {
      complain(fmt::format("tensor {} has dtype {}; it must be {}", name, printable(stored->dtype),
                           bytes ? "F8_E4M3 or U8" : file_name_of(dtype)));
      return {};
    }
    if (static_cast<int>(stored->shape.size()) != rank) {
      complain(fmt::format("tensor {} has shape [{}]; it must have {} dimensions", name, fmt::join(stored->shape, ", "),
                           rank));
      return {};
    }
    return dense(*stored, dtype);
  }

  TensorView required(std::string_view name, DType dtype, int rank) {
    if (file_.find(name) == nullptr) complain(fmt::format("tensor {} is missing", name));
    return optional(name, dtype, rank);
  }

  /// Demands that an extent equal the one it is named after.
  void same(std::string_view what, std::int64_t extent, std::string_view as, std::int64_t other) {
    if (extent != other) complain(fmt::format("{} is {} but {} is {}; they must be equal", what, extent, as, other));
  }

  void complain(std::string problem) {
    if (problem_.empty()) problem_ = std::move(problem);
  }
  [[nodiscard]] bool failed() const noexcept { return !problem_.empty(); }
  [[nodiscard]] const std::string& problem() const noexcept { return problem_; }

 private:
  static TensorView dense(const StoredTensor& stored, DType dtype) noexcept {
    TensorView view{stored.bytes.data(), dtype, Device::cpu, static_cast<int>(stored.shape.size()), {}, {}};
    std::int64_t stride = 1;
    for (std::size_t axis = stored.shape.size(); axis-- > 0;) {
      view.shape[axis] = stored.shape[axis];
      view.stride[axis] = stride;
      stride *= std::max<std::int64_t>(stored.shape[axis], 1);  // fits: the parser has checked
    }
    return view;
  }

  const Safetensors& file_;
  std::string problem_;
};

/// A dense row-major copy of a view, and its description for a file.
class DenseCopy {
 public:
  template <typename Void>
  DenseCopy(std::string_view name, const BasicTensorView<Void>& view) : DenseCopy(name, view, file_name_of(view.dtype)) {}
  template <typename Void>
  DenseCopy(std::string_view name, const BasicTensorView<Void>& view, std::string_view dtype) {
    stored_.name = name;
    stored_.dtype = dtype;
    stored_.shape.assign(view.shape.begin(), view.shape.begin() + view.rank);
    append(static_cast<const std::byte*>(view.data), view.shape.data(), view.stride.data(), view.rank,
           static_cast<std::int64_t>(size_of(view.dtype)));
  }

  [[nodiscard]] StoredTensor stored() const {
    StoredTensor result = stored_;
    result.bytes = bytes_;
    return result;
  }

 private:
  void append(const std::byte* data, const std::int64_t* shape, const std::int64_t* stride, int rank,
              std::int64_t size) {
    if (rank == 0 || (rank == 1 && *stride == 1)) {
      bytes_.insert(bytes_.end(), data, data + (rank == 0 ? size : *shape * size));
      return;
    }
    for (std::int64_t i = 0; i < *shape; ++i) append(data + i * *stride * size, shape + 1, stride + 1, rank - 1, size);
  }

  StoredTensor stored_;
  std::vector<std::byte> bytes_;
};

Result<void> save(const std::string& path, std::span<const DenseCopy> copies, const Metadata& metadata) {
  std::vector<StoredTensor> tensors;
  tensors.reserve(copies.size());
  for (const DenseCopy& copy : copies) tensors.push_back(copy.stored());
  return write_safetensors(path, std::move(tensors), metadata);
}

}  // namespace

Result<Trace> Trace::open(const std::string& path) {
  auto mapped = MappedFile::open(path);
  if (!mapped) return tl::unexpected(mapped.error());
  Trace trace;
  const auto bytes = mapped->bytes();
  trace.file_ = std::move(*mapped);
  if (auto viewed = trace.view(bytes); !viewed) {
    return fail(viewed.error().code, fmt::format("{}: {}", path, viewed.error().message));
  }
  return trace;
}

Result<Trace> Trace::parse(std::vector<std::byte> file) {
  Trace trace;
  trace.file_ = std::move(file);
  if (auto viewed = trace.view(std::get<std::vector<std::byte>>(trace.file_)); !viewed) {
    return tl::unexpected(viewed.error());
  }
  return trace;
}

Result<void> Trace::view(std::span<const std::byte> bytes) {
  auto file = parse_safetensors(bytes);
  if (!file) return tl::unexpected(file.error());
  if (auto viewed = file->find("kv_cache") == nullptr ? view_contiguous(*file) : view_pages(*file); !viewed) return viewed;
  metadata_ = std::move(file->metadata);
  return {};
}

Result<void> Trace::view_contiguous(const Safetensors& file) {
  Reader reader(file);
  Problem& p = problem_;
  p.q = reader.required("q", DType::f8_e4m3, 3);
  p.k = reader.required("k", DType::f8_e4m3, 2);
  p.k_scale = reader.required("k_scale", DType::f32, 1);
  p.w = reader.required("w", DType::f32, 2);
  p.ks = reader.optional("ks", DType::i32, 1);
  p.ke = reader.optional("ke", DType::i32, 1);
  const TensorView q_pos = reader.optional("q_pos", DType::i32, 1);
  if (q_pos.present() ? p.ks.present() || p.ke.present() : !p.ks.present() || !p.ke.present()) {
    reader.complain("the visible ranges must be given by q_pos, or by ks and ke, and not by both");
  }
  if (reader.failed()) return fail(ErrorCode::bad_file, reader.problem());

  reader.same("dim of k", p.k.shape[1], "dim of q", p.q.shape[2]);
  reader.same("length of k_scale", p.k_scale.shape[0], "number of keys in k", p.k.shape[0]);
  reader.same("rows of w", p.w.shape[0], "rows of q", p.q.shape[0]);
  reader.same("heads of w", p.w.shape[1], "heads of q", p.q.shape[1]);
  for (const auto& [name, range] : {std::pair{"ks", p.ks}, {"ke", p.ke}, {"q_pos", q_pos}}) {
    if (range.present()) reader.same(fmt::format("length of {}", name), range.shape[0], "rows of q", p.q.shape[0]);
  }
  if (reader.failed()) return fail(ErrorCode::bad_file, reader.problem());

  if (q_pos.present()) {
    const auto* position = q_pos.at<std::int32_t>();
    ke_from_q_pos_.resize(static_cast<std::size_t>(q_pos.shape[0]));
    // Saturating: the range is clamped to the keys anyway.
    std::transform(position, position + q_pos.shape[0], ke_from_q_pos_.begin(), [](std::int32_t last) {
      return last == std::numeric_limits<std::int32_t>::max() ? last : last + 1;
    });
    p.ke = dense_view<const void>(ke_from_q_pos_.data(), DType::i32, {q_pos.shape[0]});
  }
  return {};
}

Result<void> Trace::view_pages(const Safetensors& file) {
  Reader reader(file);
  const TensorView q = reader.required("q", DType::f8_e4m3, 5);
  const TensorView w = reader.required("w", DType::f32, 4);
  const TensorView kv_cache = reader.required("kv_cache", DType::f8_e4m3, 4);
  const TensorView block_table = reader.required("block_table", DType::i32, 2);
  const TensorView context_lens = reader.required("context_lens", DType::i32, 3);
  if (reader.failed()) return fail(ErrorCode::bad_file, reader.problem());
  if (q.shape[0] < 1 || q.shape[1] < 1) {
    return fail(ErrorCode::bad_file, fmt::format("q has {} steps of {} requests; there must be one at least", q.shape[0], q.shape[1]));
  }
  constexpr const char* axes[] = {"steps", "requests", "draft tokens", "heads"};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    reader.same(fmt::format("number of {} in w", axes[axis]), w.shape[axis], "that in q", q.shape[axis]);
    if (axis == 3) break;
    reader.same(fmt::format("number of {} in context_lens", axes[axis]), context_lens.shape[axis], "that in q", q.shape[axis]);
  }
  if (auto error = check_page_size(kv_cache.shape[1])) reader.complain(error->message);
  if (reader.failed()) return fail(ErrorCode::bad_file, reader.problem());
  if (auto error = check_page_pool("tensor kv_cache", kv_cache, Device::cpu, kv_cache.shape[1], q.shape[4])) {
    return fail(ErrorCode::bad_file, error->message);
  }

  const auto first_step = [](const TensorView& stream) {
    TensorView step = stream;
    step.rank -= 1;
    std::copy(stream.shape.begin() + 1, stream.shape.end(), step.shape.begin());
    std::copy(stream.stride.begin() + 1, stream.stride.end(), step.stride.begin());
    return step;
  };
  TensorView rows_of_w = first_step(w);  // [B * n, heads]
  rows_of_w = dense_view<const void>(rows_of_w.data, DType::f32, {w.shape[1] * w.shape[2], w.shape[3]});
  auto problem = decode_problem({first_step(q), rows_of_w, kv_cache, block_table, first_step(context_lens)});
  if (!problem) return fail(ErrorCode::bad_file, problem.error().message);
  problem_ = *problem;
  steps_ = q.shape[0];
  return {};
}

Problem Trace::problem(std::int64_t step) const noexcept {
  Problem problem = problem_;
  if (step == 0) return problem;
  for (TensorView* view : {&problem.q, &problem.w, &problem.ke}) {  // dense, one step after the other
    const std::int64_t bytes = view->shape[0] * view->stride[0] * static_cast<std::int64_t>(size_of(view->dtype));
    view->data = static_cast<const std::byte*>(view->data) + step * bytes;
  }
  return problem;
}

Result<void> save_trace(const std::string& path, const Problem& problem, const Metadata& metadata) {
  const std::int64_t nq = problem.q.shape[0];
  const auto first = std::int32_t{0};
  const auto end = static_cast<std::int32_t>(problem.k.shape[0]);
  TensorView ks = dense_view<const void>(&first, DType::i32, {nq});
  TensorView ke = dense_view<const void>(&end, DType::i32, {nq});
  ks.stride[0] = ke.stride[0] = 0;  // the same for every query
  if (problem.ks.present()) ks = problem.ks;
  if (problem.ke.present()) ke = problem.ke;
  const std::array copies{DenseCopy("q", problem.q), DenseCopy("k", problem.k), DenseCopy("k_scale", problem.k_scale),
                          DenseCopy("w", problem.w), DenseCopy("ks", ks),       DenseCopy("ke", ke)};
  return save(path, copies, metadata);
}

Result<void> save_decode_trace(const std::string& path, const DecodeTensors& tensors, const Metadata& metadata) {
  const std::array copies{DenseCopy("q", tensors.q), DenseCopy("w", tensors.w), DenseCopy("kv_cache", tensors.kv_cache, "U8"),
                          DenseCopy("block_table", tensors.block_table), DenseCopy("context_lens", tensors.context_lens)};
  return save(path, copies, metadata);
}

Result<void> save_selection(const std::string& path, const Selection& selection, const Metadata& metadata) {
  std::vector<DenseCopy> copies{DenseCopy("ids", selection.ids)};
  if (selection.scores.present()) copies.emplace_back("scores", selection.scores);
  return save(path, copies, metadata);
}

}  // namespace dosa
