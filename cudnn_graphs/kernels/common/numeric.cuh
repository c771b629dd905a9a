// The two 16-bit element types and the conversions of them and of fp32. NVRTC is given no toolkit header,
// so each is one PTX instruction.
#pragma once
#include "common/types.cuh"

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };

// Two floats to two elements in one register, `lo` in the low half, rounded to nearest even.
template <typename T> DEVICE u32 pack2(float lo, float hi);
template <> DEVICE u32 pack2<bf16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <> DEVICE u32 pack2<fp16>(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// One element, in the low half of `bits`, to a float: exact.
template <typename T> DEVICE float to_float(u32 bits);
template <> DEVICE float to_float<bf16>(u32 bits) { return __uint_as_float(bits << 16); }
template <> DEVICE float to_float<fp16>(u32 bits) {
    float r;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(bits));
    return r;
}

// Two elements clamped to the finite range; a NaN becomes a finite number too.
template <typename T> DEVICE u32 clamp_finite2(u32 x);
template <> DEVICE u32 clamp_finite2<bf16>(u32 x) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(0xff7fff7f));
    asm("min.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(0x7f7f7f7f));
    return x;
}
template <> DEVICE u32 clamp_finite2<fp16>(u32 x) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0xfbfffbff));
    asm("min.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x7bff7bff));
    return x;
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// 2^x and log2(x) on the special function unit; 2^-inf is exactly 0.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same, in its place among other instructions that may not move.
DEVICE float exp2_approx_here(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
