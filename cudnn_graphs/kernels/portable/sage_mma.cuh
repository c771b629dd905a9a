// 8-bit tensor core products of one warp.
#pragma once
#include "common/ptx.cuh"
#include "portable/sage_fp8.cuh"

// c += a.b, 16 x 8 x 32, int8 in, int32 out.
DEVICE void mma_16x8x32_s8(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Whether mma.sync has FP8 tensor cores under it. SM90 and SM100 accept the instruction and run it as the same
// fp16 products that this kernel makes without it, with worse register use (seen in their SASS).
#if HAS_E4M3 && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
#define FP8_PRODUCTS 1
#else
#define FP8_PRODUCTS 0
#endif

#if FP8_PRODUCTS
// c += a.b, 16 x 8 x 32, e4m3 in, fp32 out.
DEVICE void mma_16x8x32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
