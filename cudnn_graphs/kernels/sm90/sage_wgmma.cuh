// 8-bit tensor core products of one warpgroup. Registers and ordering as in sm90/wgmma.cuh.
#pragma once
#include "sm90/wgmma.cuh"

// Rows of 64 bytes under the 64-byte swizzle, in groups of 8 rows of 512 bytes. The next 32 k: + 32 bytes.
DEVICE u64 narrow_operand(u32 address) { return 2ull << 62 | u64(512 / 16) << 32 | 1u << 16 | address >> 4; }

// d = a.b or d += a.b, 64 x 128 x 32, int8 from shared memory, int32 out.
template <bool kOverwrite>
DEVICE void wgmma_s8(i32 (&d)[16][4], u64 a, u64 b) {
#define WGMMA_S8(D, SCALE) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #SCALE ", 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " WGMMA_NAMES_128 ", %64, %65, p;}" \
                 : WGMMA_REGS_128(D) : "l"(a), "l"(b))
    if constexpr (kOverwrite) WGMMA_S8("=r", 0);
    else WGMMA_S8("+r", 1);
#undef WGMMA_S8
}

// d = a.b or d += a.b, 64 x N x 32, e4m3, A from registers, B from shared memory, fp32 out.
template <int N, bool kOverwrite>
DEVICE void wgmma_e4m3(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {
#define WGMMA_E4M3(N, A0, A1, A2, A3, B, D, SCALE)                                                                             \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #SCALE ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " WGMMA_NAMES_##N \
                 ", {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;}"                                             \
                 : WGMMA_REGS_##N(D) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if constexpr (N == 128 && kOverwrite) WGMMA_E4M3(128, 64, 65, 66, 67, 68, "=f", 0);
    if constexpr (N == 128 && !kOverwrite) WGMMA_E4M3(128, 64, 65, 66, 67, 68, "+f", 1);
    if constexpr (N == 136 && kOverwrite) WGMMA_E4M3(136, 68, 69, 70, 71, 72, "=f", 0);
    if constexpr (N == 136 && !kOverwrite) WGMMA_E4M3(136, 68, 69, 70, 71, 72, "+f", 1);
#undef WGMMA_E4M3
}

DEVICE void keep_order(i32 (&d)[16][4]) {
#pragma unroll
    for (int j = 0; j < 16; ++j) asm volatile("" : "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])::"memory");
}
