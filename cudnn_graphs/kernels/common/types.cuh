// Integer names and numeric constants. NVRTC has no <cstdint>, so the widths are spelled here.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#define DEVICE __device__ __forceinline__

#define NEG_INF __int_as_float(0xff800000)
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
DEVICE constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

constexpr int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }
