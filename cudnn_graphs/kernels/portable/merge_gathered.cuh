// The parts of one attention over disjoint keys, one from each rank, merged by lse: ops/gathered_parts.py's layout.
//
// Part n lies at parts + n * part_bytes: out T [items, D], item = (b * seq_len + t) * num_heads + head, and at lse_offset
// float lse [batch, num_heads, seq_len], natural log; -inf: no visible key, and out is then not used.
#pragma once
#include "portable/part_sum.cuh"

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

template <typename T, int D>
DEVICE void merge_gathered(const MergeGatheredParams& p) {
    using Sum = PartSum<T, D>;
    const i64 item = i64(blockIdx.x) * kGatheredWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (item >= p.items) return;
    const ItemPlace<i64> at(item, p.seq_len, p.num_heads);
    const u8* lses = p.parts + p.lse_offset + 4 * at.lse_at;
    const u8* outs = p.parts + (item * D + lane * Sum::kPerLane) * i64(sizeof(T));

    float top = NEG_INF;
    for (int n = 0; n < p.num_parts; ++n) top = fmaxf(top, *reinterpret_cast<const float*>(lses + n * p.part_bytes));
    Sum sum(top);
#pragma unroll 4
    for (int n = 0; n < p.num_parts; ++n) {
        u32 words[Sum::kWords];
        load_words(words, outs + n * p.part_bytes);
        sum.add(*reinterpret_cast<const float*>(lses + n * p.part_bytes), words);
    }
    sum.store(static_cast<T*>(p.out) + at.b * p.out_stride_b + at.t * p.out_stride_t + at.head * p.out_stride_h + lane * Sum::kPerLane);
    if (p.lse != nullptr && lane == 0) p.lse[at.lse_at] = sum.lse();
}
