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
    float top[2] = {NEG_INF, NEG_INF};      // what probabilities are relative to: a score so far, times scale_log2
    float sum[2] = {0.f, 0.f};              // of this thread's columns only

    // Whether one of this thread's scores is so far above `top` that probabilities would grow past 2^kSlack.
    // While none of a row is, `top` may stay: any reference cancels in the result, and the row's maximum is then
    // not needed at all. Nearly every tile raises some row of a warp a little, and few by this much.
    template <int N>
    DEVICE bool outgrown(const float (&s)[N][4], float scale_log2) const {
        bool outgrown = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) outgrown |= fmaf(most(s, half), scale_log2, -kSlack) > top[half];
        return outgrown;
    }

    // Takes in the maximum of a tile of scores; `rescale` is what everything accumulated so far has to be
    // multiplied with. A row with no visible key yet keeps top = -inf.
    template <int N>
    DEVICE void raise(const float (&s)[N][4], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float before = top[half];
            top[half] = fmaxf(before, quad_max(most(s, half)) * scale_log2);
            rescale[half] = exp2_approx(before - base(half));
            sum[half] *= rescale[half];
        }
    }

    // Scores of eight columns to probabilities relative to the maximum. Called next to the product that
    // takes them, so that the special function unit works while the tensor cores do.
    DEVICE void exponentiate(float (&s)[4], float scale_log2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] = exp2_approx(fmaf(s[i], scale_log2, -base(i / 2)));
            sum[i / 2] += s[i];
        }
    }

private:
    static constexpr float kSlack = 8.f;

    template <int N>
    static DEVICE float most(const float (&s)[N][4], int half) {
        float most = NEG_INF;
#pragma unroll
        for (int n = 0; n < N; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        return most;
    }

    // 0 stands in for a maximum of -inf: exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN.
    DEVICE float base(int half) const { return top[half] == NEG_INF ? 0.f : top[half]; }
};
