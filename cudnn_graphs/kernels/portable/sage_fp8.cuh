// fp32 to and e4m3 to 16 bits, on parts with and without the instructions for it.
#pragma once
#include "common/types.cuh"

#if __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
#else
#define HAS_E4M3 0
#endif

// Round to nearest even in software, for SM80 to SM87: finite values saturate at 448, NaN stays NaN.
DEVICE u32 e4m3_in_software(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7f;
    float a = fminf(__uint_as_float(magnitude), 448.0f);
    if (a < 0.015625f) return sign | (__float_as_uint(a + 16384.0f) & 0xff);    // multiples of 2^-9
    u32 m = __float_as_uint(a);
    return sign | (((m + 0x7ffff + (m >> 20 & 1)) >> 20) - (120 << 3));
}

// Two floats to two e4m3 bytes, `lo` in the low one, rounded to nearest even, saturating.
DEVICE u32 pack_e4m3x2(float lo, float hi) {
#if HAS_E4M3
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
#else
    return e4m3_in_software(lo) | e4m3_in_software(hi) << 8;
#endif
}

DEVICE u32 pack_e4m3x4(float x0, float x1, float x2, float x3) {
    return pack_e4m3x2(x0, x1) | pack_e4m3x2(x2, x3) << 16;
}

// Four e4m3 bytes to four fp16 values times 2^-8 (exact, subnormals included): bytes 0 and 1 in `lo`, 2 and 3 in `hi`.
DEVICE void unpack_e4m3x4(u32 bytes, u32& lo, u32& hi) {
    u32 a = __byte_perm(bytes, 0, 0x1404), b = __byte_perm(bytes, 0, 0x3424);       // each byte to the high half of 16 bits
    lo = (a & 0x80008000) | (a & 0x7f007f00) >> 1;
    hi = (b & 0x80008000) | (b & 0x7f007f00) >> 1;
    if (((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080) {     // a NaN among them, rarely: 0x7f has become 0x3f80
        lo |= ((lo & 0x3f80) == 0x3f80) * 0x7e00u | ((lo & 0x3f800000) == 0x3f800000) * 0x7e000000u;
        hi |= ((hi & 0x3f80) == 0x3f80) * 0x7e00u | ((hi & 0x3f800000) == 0x3f800000) * 0x7e000000u;
    }
}
