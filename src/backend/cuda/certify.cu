// plan and certify: a row budget for every group of rows, a certificate for every row.
//
// One CTA takes the rows that share sampled keys, one after the other. Decisions are made and kept on the device.
#include <cstdint>

#include "backend/cuda/certify_build.cuh"

namespace dosa::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLeastRetained = budget_at(0) - 2;

// All threads: the steps that do not depend on the budget, and the ranking down to `least` heads. False: no
// certificate.
template <int kHeads>
__device__ bool prepare(CertifyShared<kHeads>& shared, const CertifyInputs& args, std::int64_t r, int least,
                        double& total) {
  __syncthreads();  // the row before is done
  if (!load_heads(shared, args, r)) return false;
  form_gram(shared);
  total = measure_heads(shared);
  if (!(total <= 0x1p60)) return false;
  gather_statistics(shared, args.in.k);
  if (threadIdx.x < 32) rank_heads(shared, least);
  __syncthreads();
  return true;
}

template <int kHeads>
__device__ void clear_padding(CertifyShared<kHeads>& shared) {
  for (int row = kHeads; row < CertifyShape<kHeads>::kRows; ++row) shared.rows[row][threadIdx.x] = 0;
}

// Columns of 16 bytes of the bound rows are written side by side.
template <int kHeads>
__device__ void write_certificate(CertifyShared<kHeads>& shared, const CertifyArgs& args, std::int64_t r, int budget,
                                  const Built& built, float tau) {
  using Shape = CertifyShape<kHeads>;
  const int t = static_cast<int>(threadIdx.x), kept = budget - 2;
  if (t < kHeads && contains(built.retained, t)) {
    shared.list[__popcll(built.retained & ((HeadSet{1} << t) - 1))] = static_cast<std::uint8_t>(t);
  }
  __syncthreads();
  const int count = __popcll(built.retained);
  bool bad = !(built.c <= 3.4028235e38F);
  if (t < kept) {
    const std::uint16_t weight = t < count ? hopper_weight(shared.coefficient[shared.list[t]]) : std::uint16_t{0};
    bad = bad || (weight & 0x7F80U) == 0x7F80U;
    args.weight[r * args.weight_stride + t] = weight;
  }
  for (int i = t; i < budget * (kDim / 16); i += kThreads) {
    const int row = i / (kDim / 16), part = i % (kDim / 16);
    const int from = row < count  ? shared.list[row]
                     : row < kept ? Shape::kRows - 1
                                  : row - kept + Shape::kHigh;  // the last row is zero
    reinterpret_cast<uint4*>(args.bound_rows + r * args.bound_stride)[i] =
        reinterpret_cast<const uint4*>(shared.rows[from])[part];
  }
  const bool failed = __syncthreads_or(bad) != 0;
  if (t != 0) return;
  args.c[r] = built.c;
  args.sigma[2 * r] = built.sigma_high;
  args.sigma[2 * r + 1] = built.sigma_low;
  args.tau[r] = tau;
  args.screened[r] = static_cast<std::uint8_t>(failed ? 0 : budget);
}

template <int kHeads>
__global__ __launch_bounds__(kThreads, 4) void certify_kernel(CertifyArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<CertifyShared<kHeads>*>(memory);
  const std::int64_t first = blockIdx.x * std::int64_t{kPanelRows};
  const std::int64_t end = min(first + kPanelRows, args.inputs.rows);
  clear_padding(shared);
  load_panel(shared, args.inputs, first, end);
  for (std::int64_t r = first; r < end; ++r) {
    const Visible visible = visible_keys(args.inputs.in, args.inputs.first_row + r);
    const int budget = visible.end - visible.begin < args.min_context ? 0 : args.budget[r];
    const float tau = hopper_tau(args.inputs.tau[r], args.inputs.allowances);
    double total = 0;
    if (budget == 0 || !(tau >= -3.4028235e38F) || !prepare(shared, args.inputs, r, budget - 2, total)) {
      if (threadIdx.x == 0) args.screened[r] = 0;
      continue;
    }
    const Built built = build(shared, args.inputs, budget - 2, total);
    write_certificate(shared, args, r, budget, built, tau);
  }
}

// ------------------------------------------------------------------------------------------------------------------
// plan

template <int kHeads>
struct PredictShared : CertifyShared<kHeads> {
  float dot[kHeads][CertifyShape<kHeads>::kPanel + 1];  // of heads with sampled keys
};

template <int kHeads>
__global__ __launch_bounds__(kThreads) void predict_kernel(PredictArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<PredictShared<kHeads>*>(memory);
  const CertifyInputs& inputs = args.inputs;
  const std::int64_t sample = blockIdx.x;
  const std::int64_t r = args.first + sample * args.stride;
  const std::int64_t first = r / kPanelRows * kPanelRows;
  clear_padding(shared);
  load_panel(shared, inputs, first, min(first + kPanelRows, inputs.rows));
  const float tau = hopper_tau(inputs.tau[r], inputs.allowances);
  double total = 0;
  const bool valid =
      shared.panel_keys > 0 && tau >= -3.4028235e38F && prepare(shared, inputs, r, kLeastRetained, total);
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, warp = t / 32;
  if (!valid) {
    if (t < kBudgetCount) args.survivors[sample * kBudgetCount + t] = -1;
    if (t == 0) args.sampled[sample] = 0;
    return;
  }

  // Dots of the heads with the sampled keys, kept: every budget needs them.
  float x[kHeads / 16][4][4];
  panel_dots(shared, inputs.in.k, x);
#pragma unroll
  for (int m = 0; m < kHeads / 16; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        shared.dot[m * 16 + i / 2 * 8 + lane / 4][warp * 32 + n * 8 + lane % 4 * 2 + i % 2] = x[m][n][i];
      }
    }
  }
  __syncthreads();
  const float alpha = shared.panel_alpha[t], rho = shared.panel_rho[t];
  for (int b = 0; b < kBudgetCount; ++b) {
    const Built built = build(shared, inputs, budget_at(b) - 2, total);
    float body = built.c * rho;
    for (int h = 0; h < kHeads; ++h) {
      const float dot = shared.dot[h][t];
      if (contains(built.retained, h)) {
        const auto weight = static_cast<std::uint32_t>(hopper_weight(shared.coefficient[h]));
        body += __uint_as_float(weight << 16) * fmaxf(dot, 0.0F);
      }
      body -= shared.share[h] * dot;
    }
    const int survivors = __syncthreads_count(alpha > 0 && !(body * alpha < tau));
    if (t == 0) args.survivors[sample * kBudgetCount + b] = survivors;
  }
  const int sampled = __syncthreads_count(alpha > 0);
  if (t == 0) args.sampled[sample] = sampled;
}

// A CTA a group of rows.
__global__ __launch_bounds__(kThreads) void choose_kernel(ChooseArgs args) {
  __shared__ int survivors[kBudgetCount];
  __shared__ int sampled;
  const std::int64_t first = blockIdx.x * args.group_rows;
  const std::int64_t end = min(first + args.group_rows, args.rows);
  if (threadIdx.x < kBudgetCount) survivors[threadIdx.x] = 0;
  if (threadIdx.x == 0) sampled = 0;
  __syncthreads();
  for (std::int64_t s = first / args.stride + threadIdx.x; s * args.stride < end; s += kThreads) {
    if (args.sampled[s] == 0) continue;
    atomicAdd(&sampled, args.sampled[s]);
    for (int b = 0; b < kBudgetCount; ++b) atomicAdd(&survivors[b], args.survivors[s * kBudgetCount + b]);
  }
  __syncthreads();
  double best = args.too_loose;
  int budget = 0;
  for (int b = 0; sampled > 0 && b < kBudgetCount; ++b) {
    const double work = budget_at(b) * args.row_price + survivors[b] * args.survivor_price / sampled + args.fixed_price;
    if (work < best) {
      best = work;
      budget = budget_at(b);
    }
  }
  for (std::int64_t r = first + threadIdx.x; r < end; r += kThreads) args.budget[r] = static_cast<std::uint8_t>(budget);
}

// One CTA a list: rows in order, by ballots.
__global__ __launch_bounds__(1024) void lists_kernel(ListsArgs args) {
  __shared__ int warp_count[32];
  const int which = blockIdx.x, lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int budget = which < kBudgetCount ? budget_at(which) : 0;
  std::int32_t* list = args.list + which * args.rows;
  int size = 0;
  for (std::int64_t first = 0; first < args.rows; first += 1024) {
    const std::int64_t r = first + threadIdx.x;
    const bool mine = r < args.rows && args.screened[r] == budget;
    const unsigned lanes = __ballot_sync(kAllLanes, mine);
    if (lane == 0) warp_count[warp] = __popc(lanes);
    __syncthreads();
    const int count = warp_count[lane];
    const int before = __reduce_add_sync(kAllLanes, lane < warp ? count : 0), all = __reduce_add_sync(kAllLanes, count);
    if (mine) list[size + before + __popc(lanes & ((1U << lane) - 1))] = static_cast<std::int32_t>(r);
    size += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) args.size[which] = size;
}

template <class Shared, class Args>
cudaError_t launch(void (*kernel)(Args), const Args& args, std::int64_t blocks, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_predict(const PredictArgs& args, cudaStream_t stream) {
  const std::int64_t samples = (args.inputs.rows - args.first + args.stride - 1) / args.stride;
  if (samples <= 0) return cudaSuccess;
  if (args.inputs.in.heads > kMaxCertifiedHeads)
    return cudaMemsetAsync(args.sampled, 0, samples * sizeof(std::int32_t), stream);
  return args.inputs.in.heads <= 32 ? launch<PredictShared<32>>(predict_kernel<32>, args, samples, stream)
                                    : launch<PredictShared<64>>(predict_kernel<64>, args, samples, stream);
}

cudaError_t launch_choose(const ChooseArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  choose_kernel<<<static_cast<unsigned>((args.rows + args.group_rows - 1) / args.group_rows), kThreads, 0, stream>>>(
      args);
  return cudaGetLastError();
}

cudaError_t launch_certify(const CertifyArgs& args, cudaStream_t stream) {
  const std::int64_t rows = args.inputs.rows;
  if (rows == 0) return cudaSuccess;
  if (args.inputs.in.heads > kMaxCertifiedHeads) return cudaMemsetAsync(args.screened, 0, rows, stream);
  const std::int64_t groups = (rows + kPanelRows - 1) / kPanelRows;
  return args.inputs.in.heads <= 32 ? launch<CertifyShared<32>>(certify_kernel<32>, args, groups, stream)
                                    : launch<CertifyShared<64>>(certify_kernel<64>, args, groups, stream);
}

cudaError_t launch_lists(const ListsArgs& args, cudaStream_t stream) {
  lists_kernel<<<kBudgetCount + 1, 1024, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace dosa::cuda
