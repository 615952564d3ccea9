// Thin names over the instructions that CUDA C++ has no words for. Addresses in shared memory are 32-bit (see `shared`).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dosa::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory (mbarrier). A barrier's phase ends when all arrivals and all announced bytes are in; waiters
// name the parity of the phase they wait for: 0 first, then 1, 0, ...

using Barrier = std::uint64_t;

__device__ __forceinline__ void init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

/// Arrives and announces bytes that asynchronous copies will bring.
__device__ __forceinline__ void arrive_and_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory");
}

/// Arrives when all cp.async of this thread so far have landed.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared(barrier)) : "memory");
}

__device__ __forceinline__ bool try_wait(Barrier* barrier, unsigned parity) {
  std::uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void wait(Barrier* barrier, unsigned parity) {
  while (!try_wait(barrier, parity)) {
  }
}

// Copies.

/// A box of a two-dimensional tensor map at (column, row) to shared memory; the barrier receives its bytes.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int column, int row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared(barrier))
      : "memory");
}

/// The same of a three-dimensional one.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int column, int row, int layer, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          shared(to)),
      "l"(map), "r"(column), "r"(row), "r"(layer), "r"(shared(barrier))
      : "memory");
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// 16 bytes, past L1; zeros unless `valid`, and then `from` is not read.
__device__ __forceinline__ void copy_16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Orders this thread's writes to shared memory before reads by tensor cores and copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Kernels on one stream. Launched by launch_early(), a kernel may begin while the one before it ends.

/// Until the kernel before this one is done, and its writes are visible. Nothing is read or written earlier.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// The next kernel may begin, once every CTA has called this or ended.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Warpgroups.

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void drop_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// True for one lane of a warp whose lanes all call it.
__device__ __forceinline__ bool elect() {
  std::uint32_t elected;
  asm volatile(
      "{ .reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace dosa::cuda::ptx
