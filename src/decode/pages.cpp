// Page pools in host memory: insert, gather, move.
#include "dosa/pages.hpp"

#include <cstring>
#include <optional>
#include <vector>

#include "base/check.hpp"
#include "base/error.hpp"
#include "base/fpenv.hpp"
#include "base/keys.hpp"
#include "score/quantize.hpp"

namespace dosa {
namespace {

constexpr std::int64_t kScaleBytes = sizeof(float);
constexpr std::int64_t kLargestDim = 128;

/// A pool, by slots.
template <typename Void>
class Slots {
 public:
  explicit Slots(const BasicTensorView<Void>& pool) noexcept
      : pool_(pool), page_size_(pool.shape[1]), dim_(pool.shape[3] - kScaleBytes) {}

  [[nodiscard]] std::int64_t count() const noexcept { return pool_.shape[0] * page_size_; }
  [[nodiscard]] auto* key(std::int64_t slot) const noexcept {
    return pool_.template at<std::uint8_t>(slot / page_size_) + slot % page_size_ * dim_;
  }
  [[nodiscard]] auto* scale(std::int64_t slot) const noexcept {
    return pool_.template at<std::uint8_t>(slot / page_size_) + page_size_ * dim_ + slot % page_size_ * kScaleBytes;
  }

 private:
  BasicTensorView<Void> pool_;
  std::int64_t page_size_, dim_;
};

std::optional<Error> check_pool(const char* name, const TensorView& pool, std::int64_t dim) {
  if (auto error = check_range("dim", dim, std::int64_t{1}, kLargestDim)) return error;
  if (auto error = check_page_size(pool.shape[1])) return error;
  return check_page_pool(name, pool, Device::cpu, pool.shape[1], dim);
}

std::optional<Error> check_slots(const char* name, const TensorView& slots, std::int64_t keys, std::int64_t count) {
  if (auto error = check_tensor(name, slots, DType::i32, Device::cpu, {keys})) return error;
  for (std::int64_t i = 0; i < keys; ++i) {
    const std::int32_t slot = *slots.at<std::int32_t>(i);
    if (slot < count) continue;
    return Error{ErrorCode::invalid_argument,
                 fmt::format("{}[{}] is {}; the pool has slots 0 to {}", name, i, slot, count - 1)};
  }
  return std::nullopt;
}

template <typename T>
void read_row(const TensorView& rows, std::int64_t row, std::vector<T>& out) {
  for (std::size_t d = 0; d < out.size(); ++d) out[d] = *rows.at<T>(row, d);
}

}  // namespace

Result<void> insert_keys(const MutableTensorView& kv_cache, const TensorView& keys, const TensorView& slots,
                         const QuantizeRule& rule) {
  const std::int64_t n = keys.shape[0], dim = keys.shape[1];
  const bool bf16 = keys.dtype == DType::bf16;
  if (auto error = check_tensor("keys", keys, bf16 ? DType::bf16 : DType::f32, Device::cpu, {n, dim}))
    return tl::unexpected(*error);
  if (auto error = check_pool("kv_cache", const_view(kv_cache), dim)) return tl::unexpected(*error);
  const Slots pool(kv_cache);
  if (auto error = check_slots("slots", slots, n, pool.count())) return tl::unexpected(*error);

  const ScopedFloatEnvironment environment;
  std::vector<float> row(static_cast<std::size_t>(dim));
  std::vector<std::uint16_t> row_bf16(row.size());
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t slot = *slots.at<std::int32_t>(i);
    if (slot < 0) continue;
    const std::span<std::uint8_t> out{pool.key(slot), row.size()};
    float scale = 0;
    if (bf16) {
      read_row(keys, i, row_bf16);
      scale = quantize_row_bf16(row_bf16, out, rule.scale, rule.floor);
    } else {
      read_row(keys, i, row);
      scale = quantize_row(row, out, rule.scale, rule.floor);
    }
    std::memcpy(pool.scale(slot), &scale, sizeof scale);
  }
  return {};
}

Result<void> gather_keys(const TensorView& kv_cache, const TensorView& blocks, std::int64_t first,
                         const MutableTensorView& k, const MutableTensorView& k_scale) {
  const std::int64_t n = k.shape[0], dim = k.shape[1];
  if (auto error = check_tensor("k", const_view(k), DType::f8_e4m3, Device::cpu, {n, dim}))
    return tl::unexpected(*error);
  if (auto error = check_tensor("k_scale", const_view(k_scale), DType::f32, Device::cpu, {n}))
    return tl::unexpected(*error);
  if (auto error = check_pool("kv_cache", kv_cache, dim)) return tl::unexpected(*error);
  if (auto error = check_tensor("blocks", blocks, DType::i32, Device::cpu, {blocks.shape[0]}))
    return tl::unexpected(*error);
  const std::int64_t page_size = kv_cache.shape[1];
  const std::int64_t room = blocks.shape[0] * page_size;
  if (first < 0 || first > room - n) {
    return fail(ErrorCode::invalid_argument, fmt::format("positions {} to {} are asked for; the {} blocks hold 0 to {}",
                                                         first, first + n - 1, blocks.shape[0], room - 1));
  }
  for (std::int64_t block = first / page_size; block * page_size < first + n; ++block) {
    const std::int32_t id = *blocks.at<std::int32_t>(block);
    if (id >= 0 && id < kv_cache.shape[0]) continue;
    return fail(ErrorCode::invalid_argument,
                fmt::format("blocks[{}] is {}; pages are 0 to {}", block, id, kv_cache.shape[0] - 1));
  }

  const KeyRows keys(kv_cache, blocks, dim);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint8_t* row = keys.row(first + i);
    for (std::int64_t d = 0; d < dim; ++d) *k.at<std::uint8_t>(i, d) = row[d];
    const float scale = keys.scale(first + i);
    std::memcpy(k_scale.at<float>(i), &scale, sizeof scale);
  }
  return {};
}

Result<void> move_keys(const TensorView& from, const TensorView& from_slots, const MutableTensorView& to,
                       const TensorView& to_slots) {
  const std::int64_t n = from_slots.shape[0], dim = from.shape[3] - kScaleBytes;
  if (auto error = check_pool("from", from, dim)) return tl::unexpected(*error);
  if (auto error = check_pool("to", const_view(to), dim)) return tl::unexpected(*error);
  const Slots source(from);
  const Slots target(to);
  if (auto error = check_slots("from_slots", from_slots, n, source.count())) return tl::unexpected(*error);
  if (auto error = check_slots("to_slots", to_slots, n, target.count())) return tl::unexpected(*error);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t source_slot = *from_slots.at<std::int32_t>(i);
    const std::int32_t target_slot = *to_slots.at<std::int32_t>(i);
    if (source_slot < 0 || target_slot < 0) continue;
    std::memmove(target.key(target_slot), source.key(source_slot), static_cast<std::size_t>(dim));
    std::memmove(target.scale(target_slot), source.scale(source_slot), kScaleBytes);
  }
  return {};
}

}  // namespace dosa
