// Online softmax over one warpgroup's score tile, with a maximum that moves only when it must.
#pragma once
#include "common/softmax.cuh"

// The two rows of one thread, in the accumulator layout of wgmma.
struct LazySoftmax {
    // A stale maximum is exact as long as nothing overflows: probabilities up to 2^8 keep their relative
    // precision in both element types, and the output is rescaled in the first few tiles of a row only.
    static constexpr float kSlack = 8.f;

    float top[2] = {NEG_INF, NEG_INF};      // scaled by scale_log2; at most kSlack under the largest score
    float sum[2] = {0.f, 0.f};              // of this thread's columns only
    float rescale[2] = {1.f, 1.f};

    // Scores become probabilities. True: what was accumulated so far must be multiplied by `rescale`; the
    // same answer in the whole warp.
    template <int N>
    DEVICE bool step(float (&s)[N][4], float scale_log2) {
        float most[4] = {s[0][0], s[0][1], s[0][2], s[0][3]};      // two chains a row: their latency would show
#pragma unroll
        for (int j = 1; j < N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], s[j][e]);
        const float upper = quad_max(fmaxf(most[0], most[1])) * scale_log2, lower = quad_max(fmaxf(most[2], most[3])) * scale_log2;
        const bool moves = __any_sync(~0u, upper - top[0] > kSlack || lower - top[1] > kSlack);
        if (moves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float now = fmaxf(top[half], half == 0 ? upper : lower);
                rescale[half] = now == NEG_INF ? 1.f : exp2_approx(top[half] - now);
                top[half] = now;
                sum[half] *= rescale[half];
            }
        }
        // No visible key yet: 0 stands in, since exp2(-inf - 0) is 0.
        const float base[2] = {top[0] == NEG_INF ? 0.f : top[0], top[1] == NEG_INF ? 0.f : top[1]};
        float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) total[e] += s[j][e] = exp2_approx(fmaf(s[j][e], scale_log2, -base[e / 2]));
        sum[0] += total[0] + total[1];
        sum[1] += total[2] + total[3];
        return moves;
    }
};
