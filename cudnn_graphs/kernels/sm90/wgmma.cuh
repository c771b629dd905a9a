// Tensor core products of one warpgroup, 64 x N x 16, 16-bit operands, fp32 accumulators.
//
// Accumulators d[N / 8][4]: a thread holds, of its warp's 16 rows, rows lane / 4 (0, 1) and lane / 4 + 8
// (2, 3), columns 8 j + 2 (lane % 4) + {0, 1} of d[j]. A in registers has the layout of mma m16n8k16's A.
#pragma once
#include "common/numeric.cuh"
#include "common/types.cuh"
#include "sm90/wgmma_registers.cuh"

// ---- Operands in shared memory lie in rows of 128 bytes under the 128-byte swizzle, in groups of 8 rows:
// 1024 bytes from group to group. Bits: address / 16 at 0, leading offset / 16 at 16, stride / 16 at 32, swizzle at 62.

constexpr u64 kSwizzle128 = 1ull << 62;
constexpr u64 kGroupStride = u64(1024 / 16) << 32;

// In a cluster a shared address carries the block's rank from bit 24 on; the descriptor takes 18 bits.
DEVICE u64 operand_address(u32 address) { return (address & 0x3ffff) / 16; }

// Rows run over M or N, 64 k a row. The next 16 k: + 32 bytes. The leading offset is not used.
DEVICE u64 k_major_operand(u32 address) { return kSwizzle128 | kGroupStride | 1u << 16 | operand_address(address); }
// Rows run over k, 64 n a row; the next 64 n lie `chunk_bytes` further. The next 16 k: + 2048 bytes.
DEVICE u64 n_major_operand(u32 address, u32 chunk_bytes) { return kSwizzle128 | kGroupStride | u64(chunk_bytes / 16) << 16 | operand_address(address); }
// In units of the descriptor.
DEVICE constexpr u64 operand_bytes(u32 bytes) { return bytes / 16; }

// ---- Ordering. Registers of a product may be touched between its wait and the next fence only; keep_order
// stops the compiler from moving their uses across either.

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

template <int N>
DEVICE void keep_order(float (&d)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}

// D: "+f" to add to d with SCALE 1; "=f" to overwrite it with SCALE 0, so that nothing before defines it: ptxas
// serializes products whose accumulators other instructions define while one is under way. OPERANDS: a and b.
#define WGMMA(N, TYPE, D, SCALE, OPERANDS, TRANSPOSED, ...)                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #SCALE ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                 " " WGMMA_NAMES_##N ", " OPERANDS ", p, 1, 1, " TRANSPOSED ";}" : WGMMA_REGS_##N(D) : __VA_ARGS__)
#define WGMMA_SS(N, TYPE, A, B)                                                                                              \
    if constexpr (kOverwrite) WGMMA(N, TYPE, "=f", 0, "%" #A ", %" #B, "0, 0", "l"(a), "l"(b));                              \
    else WGMMA(N, TYPE, "+f", 1, "%" #A ", %" #B, "0, 0", "l"(a), "l"(b))
#define WGMMA_RS(N, TYPE, A0, A1, A2, A3, B, T)                                                                              \
    if constexpr (kOverwrite)                                                                                                \
        WGMMA(N, TYPE, "=f", 0, "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B, "%" #T, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kNMajor)); \
    else WGMMA(N, TYPE, "+f", 1, "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B, "%" #T, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kNMajor))

template <typename T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;

// d = A.B or d += A.B, both from shared memory, both k-major.
template <typename T, int N, bool kOverwrite>
DEVICE void wgmma_ss(float (&d)[N / 8][4], u64 a, u64 b) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64 && kIsBf16<T>) { WGMMA_SS(64, "bf16", 32, 33); }
    if constexpr (N == 64 && !kIsBf16<T>) { WGMMA_SS(64, "f16", 32, 33); }
    if constexpr (N == 128 && kIsBf16<T>) { WGMMA_SS(128, "bf16", 64, 65); }
    if constexpr (N == 128 && !kIsBf16<T>) { WGMMA_SS(128, "f16", 64, 65); }
}

// The same, A from registers, B from shared memory, n-major where kNMajor.
template <typename T, int N, bool kOverwrite, int kNMajor>
DEVICE void wgmma_rs(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) {
    static_assert(N == 64 || N == 128);
    if constexpr (N == 64 && kIsBf16<T>) { WGMMA_RS(64, "bf16", 32, 33, 34, 35, 36, 37); }
    if constexpr (N == 64 && !kIsBf16<T>) { WGMMA_RS(64, "f16", 32, 33, 34, 35, 36, 37); }
    if constexpr (N == 128 && kIsBf16<T>) { WGMMA_RS(128, "bf16", 64, 65, 66, 67, 68, 69); }
    if constexpr (N == 128 && !kIsBf16<T>) { WGMMA_RS(128, "f16", 64, 65, 66, 67, 68, 69); }
}

#undef WGMMA
#undef WGMMA_SS
#undef WGMMA_RS
