// FP8 tensor-core products of a warpgroup (wgmma, E4M3 x E4M3 -> f32), of the shapes that are used.
//
// D[64][N] = A[64][128] B[N][128]^T. A and B lie in shared memory as rows of 128 bytes with the 128-byte swizzle, 1024-byte
// aligned. In D, register 4 j + 2 h + e of lane (g = lane / 4, c = lane % 4) of warp w is row 16 w + 8 h + g, column
// 8 j + 2 c + e.
#pragma once

#include <cstdint>

#include "backend/cuda/ptx.cuh"

namespace dosa::cuda {

/// The half of a matrix descriptor that says where: address / 16, and a leading dimension that the swizzle does not use. The
/// other half, in WgmmaStep: 8-row groups 1024 bytes apart, 128-byte swizzle. Adding bytes / 16 moves it.
__device__ __forceinline__ std::uint32_t rows_at(const void* rows) { return (ptx::shared(rows) >> 4 & 0x3FFF) | 1U << 16; }

/// Before the first product after D's registers were touched.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kPending groups are under way; `d` may be read afterwards, not before.
template <int kPending, int kRegisters>
__device__ __forceinline__ void wgmma_wait(float (&d)[kRegisters]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N, bool kAccumulate>
struct WgmmaStep;

template <bool kAccumulate>
struct WgmmaStep<8, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[4], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %6, 0;\n"
        "mov.b64 a, {%4, 0x40000040}; mov.b64 b, {%5, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<16, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[8], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %10, 0;\n"
        "mov.b64 a, {%8, 0x40000040}; mov.b64 b, {%9, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<32, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[16], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %18, 0;\n"
        "mov.b64 a, {%16, 0x40000040}; mov.b64 b, {%17, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<64, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[32], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %34, 0;\n"
        "mov.b64 a, {%32, 0x40000040}; mov.b64 b, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<128, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[64], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %66, 0;\n"
        "mov.b64 a, {%64, 0x40000040}; mov.b64 b, {%65, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<160, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[80], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %82, 0;\n"
        "mov.b64 a, {%80, 0x40000040}; mov.b64 b, {%81, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

template <bool kAccumulate>
struct WgmmaStep<192, kAccumulate> {
  static __device__ __forceinline__ void run(float (&d)[96], std::uint32_t a, std::uint32_t b) {
    asm volatile(
        "{ .reg .pred accumulate; .reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %98, 0;\n"
        "mov.b64 a, {%96, 0x40000040}; mov.b64 b, {%97, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
        "}, a, b, accumulate, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
        : "r"(a), "r"(b), "n"(kAccumulate ? 1 : 0));
  }
};

/// The four k32 steps of d = a b^T, in order: the order decides the bits. A group of its own.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], std::uint32_t a, std::uint32_t b) {
  constexpr int kStep = 32 >> 4;
  wgmma_fence();
  WgmmaStep<N, false>::run(d, a, b);
  WgmmaStep<N, true>::run(d, a + kStep, b + kStep);
  WgmmaStep<N, true>::run(d, a + 2 * kStep, b + 2 * kStep);
  WgmmaStep<N, true>::run(d, a + 3 * kStep, b + 3 * kStep);
  wgmma_commit();
}

}  // namespace dosa::cuda
