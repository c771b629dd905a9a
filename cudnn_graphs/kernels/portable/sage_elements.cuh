// Eight channels of one token as they lie in memory, and the largest magnitudes of several tokens.
#pragma once
#include "common/ptx.cuh"

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

// 16 bytes to shared memory, past L1; zeros when !valid. `last_use`: the first to leave L2.
DEVICE void cp_async16(u32 to, const void* from, bool valid, bool last_use) {
    if (!last_use) return cp_async16(to, from, valid);
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" :: "r"(to), "l"(from), "r"(valid ? 16 : 0), "l"(policy) : "memory");
}

template <typename T>
struct alignas(16) RawRow {
    u32 w[4];
    DEVICE void copy_async(const T* from, bool exists, bool last_use) { cp_async16(smem_address(w), from, exists, last_use); }
    DEVICE void gather(const T* from, i64 stride, bool exists) {
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = !exists ? 0 : from[2 * i * stride].bits | u32(from[(2 * i + 1) * stride].bits) << 16;
    }
    DEVICE float at(int c) const { return as_float(T{}, c % 2 ? w[c / 2] >> 16 : w[c / 2] & 0xffff); }
    DEVICE void two_at(int pair, float& x, float& y) const {
        const u32 both = w[pair];
        x = as_float(T{}, both & 0xffff);
        y = as_float(T{}, both >> 16);
    }
};
template <>
struct alignas(16) RawRow<float> {
    float x[8];
    DEVICE void copy_async(const float* from, bool exists, bool last_use) {
        cp_async16(smem_address(x), from, exists, last_use);
        cp_async16(smem_address(x + 4), from + 4, exists, last_use);
    }
    DEVICE void gather(const float* from, i64 stride, bool exists) {
        #pragma unroll
        for (int c = 0; c < 8; c++) x[c] = exists ? from[c * stride] : 0.0f;
    }
    DEVICE float at(int c) const { return x[c]; }
    DEVICE void two_at(int pair, float& a, float& b) const {
        a = x[2 * pair];
        b = x[2 * pair + 1];
    }
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
