// Partial results of one (query token, head) over disjoint key sets, merged by lse.
//
// Contract of every kernel that writes partials, indexed by split s and
// i = (b * seq_len_q + t) * num_qo_heads + head:
//   partial_lse[s, i]     natural log, scale included; -inf: no visible key; +inf: the row is bad
//   partial_out[s, i, D]  fp32, normalized by this part's own sum; unread unless its lse is finite
#pragma once
#include "common/launch_chain.cuh"
#include "common/numeric.cuh"
#include "common/types.cuh"

struct MergeParams {
    const float* partial_out;
    const float* partial_lse;
    void* out;                  // [batch, seq_len_q, num_qo_heads, D], strides in elements
    float* lse;                 // [batch, num_qo_heads, seq_len_q]; null: not wanted
    i64 out_stride_b, out_stride_t, out_stride_h;
    i64 items;                  // batch * seq_len_q * num_qo_heads
    i32 seq_len_q, num_qo_heads, num_splits;
};

constexpr int kMergeWarps = 4;

DEVICE float warp_max(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

template <int N>
DEVICE void load_floats(float (&to)[N], const float* from) {
    if constexpr (N == 2) {
        float2 v = *reinterpret_cast<const float2*>(from);
        to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = *reinterpret_cast<const float4*>(from + i);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    }
}

// One warp per item; each lane owns D / 32 consecutive channels.
template <typename T, int D>
DEVICE void merge_splits(const MergeParams& p) {
    constexpr int kPerLane = D / 32;
    const i64 item = i64(blockIdx.x) * kMergeWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (item >= p.items) return;

    // Before the loop: 64-bit divisions after it spill the accumulators around them on sm_100 and sm_120.
    const int head = item % p.num_qo_heads;
    const i64 token = item / p.num_qo_heads;
    const i64 b = token / p.seq_len_q, t = token % p.seq_len_q;
    wait_for_launch_before();

    float top = NEG_INF;
    for (int s = lane; s < p.num_splits; s += 32) top = fmaxf(top, p.partial_lse[s * p.items + item]);
    top = warp_max(top);
    const bool bad = top == -NEG_INF;

    // Lane i holds the weight of split first + i, so that the loads of several parts are in flight at once.
    float sum = 0.f, acc[kPerLane] = {};
    for (int first = 0; first < p.num_splits && !bad; first += 32) {
        const int count = min(32, p.num_splits - first);
        const float lse = lane < count ? p.partial_lse[(first + lane) * p.items + item] : NEG_INF;
        const float mine = lse == NEG_INF ? 0.f : exp2_approx((lse - top) * kLog2e);
        const u32 seen = __ballot_sync(~0u, lse != NEG_INF);    // a NaN is seen: a visible NaN must show
        const float* from = p.partial_out + (first * p.items + item) * D + lane * kPerLane;
#pragma unroll 4
        for (int s = 0; s < count; ++s) {
            float part[kPerLane] = {};
            if (seen >> s & 1) load_floats(part, from + s * p.items * D);
            const float weight = __shfl_sync(~0u, mine, s);
            sum += weight;
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) acc[i] += weight * part[i];
        }
    }
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;

    u32 packed[kPerLane / 2];
#pragma unroll
    for (int i = 0; i < kPerLane; i += 2) packed[i / 2] = pack2<T>(acc[i] * inverse, acc[i + 1] * inverse);
    T* out = static_cast<T*>(p.out) + b * p.out_stride_b + t * p.out_stride_t + head * p.out_stride_h + lane * kPerLane;
    if constexpr (kPerLane == 2) *reinterpret_cast<u32*>(out) = packed[0];
    if constexpr (kPerLane == 4) *reinterpret_cast<uint2*>(out) = make_uint2(packed[0], packed[1]);
    if constexpr (kPerLane == 8) *reinterpret_cast<uint4*>(out) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    if (p.lse != nullptr && lane == 0)
        p.lse[(b * p.num_qo_heads + head) * p.seq_len_q + t] = bad || sum == 0.f ? NEG_INF : top + log2_approx(sum) * kLn2;
}
