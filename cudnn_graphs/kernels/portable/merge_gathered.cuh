// The parts of one attention over disjoint keys, one from each rank, merged by lse: ops/gathered_parts.py's layout.
//
// Part n lies at parts + n * part_bytes: out T [items, D], item = (b * seq_len + t) * num_heads + head, and at lse_offset
// float lse [batch, num_heads, seq_len], natural log; -inf: no visible key, and out is then not read.
#pragma once
#include "common/numeric.cuh"

struct MergeGatheredParams {
    const u8* parts;
    void* out;                  // T, strides in elements
    float* lse;                 // [batch, num_heads, seq_len]; null: not wanted
    i64 part_bytes, lse_offset;
    i64 out_stride_b, out_stride_t, out_stride_h;
    i64 items;
    i32 seq_len, num_heads, num_parts;
};

constexpr int kGatheredWarps = 4;

// N consecutive elements, loaded and stored in as few 4- to 16-byte words as they fill.
template <typename T, int N>
DEVICE void load_part(float (&to)[N], const u8* from) {
    constexpr int kWords = N * (sizeof(T) == 4 ? 2 : 1) / 2;
    u32 words[kWords];
    if constexpr (kWords >= 4) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) *reinterpret_cast<uint4*>(words + i) = *reinterpret_cast<const uint4*>(from + 4 * i);
    } else if constexpr (kWords == 2) {
        *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
    } else {
        words[0] = *reinterpret_cast<const u32*>(from);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (sizeof(T) == 4) to[i] = __uint_as_float(words[i]);
        else to[i] = to_float<T>(words[i / 2] >> (i % 2 * 16) & 0xffff);
    }
}

template <typename T, int N>
DEVICE void store_merged(T* to, const float (&from)[N]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = from[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) *reinterpret_cast<u32*>(to + i) = pack2<T>(from[i], from[i + 1]);
    }
}

// One warp per item; each lane owns D / 32 consecutive channels. Parts are added in rank order: the same bits on every rank.
template <typename T, int D>
DEVICE void merge_gathered(const MergeGatheredParams& p) {
    constexpr int kPerLane = D / 32;
    const i64 item = i64(blockIdx.x) * kGatheredWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (item >= p.items) return;
    const int head = item % p.num_heads;
    const i64 token = item / p.num_heads, b = token / p.seq_len, t = token % p.seq_len;
    const i64 lse_at = (b * p.num_heads + head) * p.seq_len + t;
    const u8* lses = p.parts + p.lse_offset + 4 * lse_at;
    const u8* outs = p.parts + (item * D + lane * kPerLane) * i64(sizeof(T));

    float top = NEG_INF;
    for (int n = 0; n < p.num_parts; ++n) top = fmaxf(top, *reinterpret_cast<const float*>(lses + n * p.part_bytes));
    float sum = 0.f, acc[kPerLane] = {};
#pragma unroll 4
    for (int n = 0; n < p.num_parts; ++n) {
        const float lse = *reinterpret_cast<const float*>(lses + n * p.part_bytes);
        if (lse == NEG_INF) continue;                       // a NaN is taken: it must show
        const float weight = exp2_approx((lse - top) * kLog2e);
        float part[kPerLane];
        load_part<T>(part, outs + n * p.part_bytes);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) acc[i] += weight * part[i];
    }
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) acc[i] *= inverse;
    store_merged<T>(static_cast<T*>(p.out) + b * p.out_stride_b + t * p.out_stride_t + head * p.out_stride_h + lane * kPerLane, acc);
    if (p.lse != nullptr && lane == 0) p.lse[lse_at] = sum == 0.f ? NEG_INF : top + log2_approx(sum) * kLn2;
}
