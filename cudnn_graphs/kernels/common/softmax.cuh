// Online softmax over score tiles that lie in the accumulator layout of mma m16n8k16: a thread holds, of
// a 16-row fragment, rows lane / 4 and lane / 4 + 8, two neighbouring columns of every eight; the four
// lanes of a quad share a row.
#pragma once
#include "common/numeric.cuh"
#include "common/types.cuh"

DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The running state of the two rows that one thread holds of one 16-row fragment.
struct OnlineSoftmax {
    float top[2] = {NEG_INF, NEG_INF};      // largest score so far, times scale_log2
    float sum[2] = {0.f, 0.f};              // of this thread's columns only

    // Turns a tile of scores into probabilities relative to the new maximum, and returns by `rescale` what
    // everything accumulated so far has to be multiplied with. A row with no visible key yet keeps
    // top = -inf, and 0 stands in for it: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN.
    template <int N>
    DEVICE void step(float (&s)[N][4], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = NEG_INF;
#pragma unroll
            for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            const float now = fmaxf(top[half], quad_max(most) * scale_log2);
            const float base = now == NEG_INF ? 0.f : now;
            rescale[half] = exp2_approx(top[half] - base);
            top[half] = now;
            float total = 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                s[n][2 * half] = exp2_approx(fmaf(s[n][2 * half], scale_log2, -base));
                s[n][2 * half + 1] = exp2_approx(fmaf(s[n][2 * half + 1], scale_log2, -base));
                total += s[n][2 * half] + s[n][2 * half + 1];
            }
            sum[half] = sum[half] * rescale[half] + total;
        }
    }
};
