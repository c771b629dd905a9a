// Eight channels of one token as they lie in memory, and the largest magnitudes of several tokens.
#pragma once
#include "common/numeric.cuh"

DEVICE float max_or_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}
DEVICE u32 max2(bf16, u32 a, u32 b) {
    u32 m;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
}
DEVICE u32 max2(fp16, u32 a, u32 b) {
    u32 m;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
}
DEVICE float as_float(bf16, u32 half) { return __uint_as_float(half << 16); }
DEVICE float as_float(fp16, u32 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(half)));
    return x;
}

// 16 bytes past L1; zeros when !valid, and then nothing is read. `last_use`: the first to leave L2.
DEVICE void load16(u32 (&w)[4], const void* from, bool valid, bool last_use) {
    w[0] = w[1] = w[2] = w[3] = 0;
    if (!valid) return;
    u64 policy;
    if (last_use) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from), "l"(policy) : "memory");
}

template <typename T>
struct alignas(16) RawRow {
    u32 w[4];
    DEVICE void load(const T* from, bool exists, bool last_use) { load16(w, from, exists, last_use); }
    DEVICE void gather(const T* from, i64 stride, bool exists) {
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = !exists ? 0 : from[2 * i * stride].bits | u32(from[(2 * i + 1) * stride].bits) << 16;
    }
    DEVICE float at(int c) const { return as_float(T{}, c % 2 ? w[c / 2] >> 16 : w[c / 2] & 0xffff); }
};
template <>
struct alignas(16) RawRow<float> {
    float x[8];
    DEVICE void load(const float* from, bool exists, bool last_use) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 w[4];
            load16(w, from + 4 * i, exists, last_use);
#pragma unroll
            for (int c = 0; c < 4; c++) x[4 * i + c] = __uint_as_float(w[c]);
        }
    }
    DEVICE void gather(const float* from, i64 stride, bool exists) {
        #pragma unroll
        for (int c = 0; c < 8; c++) x[c] = exists ? from[c * stride] : 0.0f;
    }
    DEVICE float at(int c) const { return x[c]; }
};

template <typename T>
struct Peak {
    u32 w[4];
    DEVICE explicit Peak(const RawRow<T>& x) {
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = x.w[i] & 0x7fff7fff;
    }
    DEVICE void add(const RawRow<T>& x) {
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = max2(T{}, w[i], x.w[i] & 0x7fff7fff);
    }
    DEVICE float at(int c) const { return as_float(T{}, c % 2 ? w[c / 2] >> 16 : w[c / 2] & 0xffff); }
};
template <>
struct Peak<float> {
    float x[8];
    DEVICE explicit Peak(const RawRow<float>& row) {
        #pragma unroll
        for (int c = 0; c < 8; c++) x[c] = fabsf(row.x[c]);
    }
    DEVICE void add(const RawRow<float>& row) {
        #pragma unroll
        for (int c = 0; c < 8; c++) x[c] = max_or_nan(x[c], fabsf(row.x[c]));
    }
    DEVICE float at(int c) const { return x[c]; }
};
