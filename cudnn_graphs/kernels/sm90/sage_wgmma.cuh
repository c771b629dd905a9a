// 8-bit tensor core products of one warpgroup. Registers and ordering as in sm90/wgmma.cuh.
#pragma once
#include "sm90/wgmma.cuh"

// Rows of 64 bytes under the 64-byte swizzle, in groups of 8 rows of 512 bytes. The next 32 k: + 32 bytes.
DEVICE u64 narrow_operand(u32 address) { return 2ull << 62 | u64(512 / 16) << 32 | 1u << 16 | address >> 4; }

#define REG(type, j) type(d[j][0]), type(d[j][1]), type(d[j][2]), type(d[j][3])
#define REGS_64(type) REG(type, 0), REG(type, 1), REG(type, 2), REG(type, 3), REG(type, 4), REG(type, 5), REG(type, 6), REG(type, 7)
#define REGS_128(type) \
    REGS_64(type), REG(type, 8), REG(type, 9), REG(type, 10), REG(type, 11), REG(type, 12), REG(type, 13), REG(type, 14), REG(type, 15)
#define NAMES_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31}"
#define NAMES_128 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
    "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d (+)= a.b, 64 x 64 x 32, int8 from shared memory, int32 out.
DEVICE void wgmma_s8(i32 (&d)[8][4], u64 a, u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " NAMES_64 ", %32, %33, p;}"
                 : REGS_64("+r") : "l"(a), "l"(b), "r"(accumulate));
}

// d (+)= a.b, 64 x 128 x 32, e4m3, A from registers, B from shared memory, fp32 out.
DEVICE void wgmma_e4m3(float (&d)[16][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " NAMES_128
                 ", {%64, %65, %66, %67}, %68, p, 1, 1;}"
                 : REGS_128("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

DEVICE void keep_order(i32 (&d)[8][4]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) asm volatile("" : "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])::"memory");
}

#undef REG
#undef REGS_64
#undef REGS_128
#undef NAMES_64
#undef NAMES_128
