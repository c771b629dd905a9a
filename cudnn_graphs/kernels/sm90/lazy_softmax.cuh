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

    // Scores become probabilities, by a scale that is not negative. True: what was accumulated so far must be multiplied by
    // `rescale`; the same answer in the whole warp.
    template <int N>
    DEVICE bool step(float (&s)[N][4], float scale_log2) {
        const bool moves = follow(s, scale_log2);
        exponentiate<false>(s, scale_log2);
        return moves;
    }

    // The two halves of a step. First the maximum,
    template <int N>
    DEVICE bool follow(const float (&s)[N][4], float scale_log2) {
        const bool moves = __any_sync(~0u, outgrown(s));
        if (moves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) raise(half, quad_max(most(s, half)) * scale_log2, scale_log2);
        }
        return moves;
    }
    // then the exponentials; kHere: not later in the program, whatever the compiler finds better.
    template <bool kHere, int N>
    DEVICE void exponentiate(float (&s)[N][4], float scale_log2) {
        // No visible key yet: 0 stands in, since exp2(-inf - 0) is 0.
        const float base[2] = {top[0] == NEG_INF ? 0.f : top[0], top[1] == NEG_INF ? 0.f : top[1]};
        float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = fmaf(s[j][e], scale_log2, -base[e / 2]);
                total[e] += s[j][e] = kHere ? exp2_approx_here(x) : exp2_approx(x);
            }
        sum[0] += total[0] + total[1];
        sum[1] += total[2] + total[3];
    }

private:
    static constexpr i32 kNothing = i32(0x80000000);
    // The raw score from which on `top` may not stay, as bits. Floats that are not negative are ordered as integers are, of which Hopper
    // takes the maximum of three at once. Where it would be negative: kNothing, which every score
    // reaches, so that the maximum is looked for in every tile.
    i32 limit[2] = {kNothing, kNothing};

    // Whether a score of this thread reaches its row's limit. A negative one, as an integer, is under any limit but kNothing.
    template <int N>
    DEVICE bool outgrown(const float (&s)[N][4]) const {
        bool outgrown = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            i32 most[2] = {__float_as_int(s[0][2 * half]), __float_as_int(s[0][2 * half + 1])};     // two chains: their latency would show
#pragma unroll
            for (int j = 1; j < N - 1; j += 2)
#pragma unroll
                for (int e = 0; e < 2; ++e) most[e] = max(max(most[e], __float_as_int(s[j][2 * half + e])), __float_as_int(s[j + 1][2 * half + e]));
            const i32 last = max(__float_as_int(s[N - 1][2 * half]), __float_as_int(s[N - 1][2 * half + 1]));
            outgrown |= max(max(most[0], most[1]), last) >= limit[half];
        }
        return outgrown;
    }

    template <int N>
    static DEVICE float most(const float (&s)[N][4], int half) {
        float most = NEG_INF;
#pragma unroll
        for (int j = 0; j < N; ++j) most = fmaxf(most, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
        return most;
    }

    DEVICE void raise(int half, float score, float scale_log2) {
        const float now = fmaxf(top[half], score);
        rescale[half] = now == NEG_INF ? 1.f : exp2_approx(top[half] - now);
        top[half] = now;
        sum[half] *= rescale[half];
        const float bound = (now + kSlack) / scale_log2;
        limit[half] = bound >= 0.f ? __float_as_int(bound) : kNothing;
    }
};
