// Online softmax over int8 scores, in the accumulator layout of one 16-row fragment: a thread holds rows
// lane / 4 (0, 1) and lane / 4 + 8 (2, 3), columns 2 (lane % 4) + {0, 1} of every eight.
//
// |q . k| <= 128 * 127 * 127 < 2^22, so a score added to the bits of 1.5 * 2^23 is the float 1.5 * 2^23 + score,
// exactly: accumulators start at those bits and no conversion is needed. P is made 448 times too large, to use
// all of e4m3's range; the sum is of the unrounded P and as much too large.
#pragma once
#include "common/softmax.cuh"

constexpr u32 kScoreBits = 0x4b400000;
constexpr float kScoreZero = 12582912.0f;

struct SageSoftmax {
    static constexpr float kLog2Reference = 8.807354922057604f;     // log2(448)

    float top[2] = {NEG_INF, NEG_INF};  // largest score so far, times log2(e)
    float sum[2] = {0.0f, 0.0f};        // of this thread's columns, times 448

    // s: scores of kBlocks key blocks on top of kScoreZero, -inf where invisible; turned into P * 448 in place.
    // scale: score to log2 units, per block, positive. At least one score of each row must be visible by now.
    template <int kBlocks>
    DEVICE void step(float (&s)[8 * kBlocks][4], const float (&scale)[kBlocks], float (&rescale)[2]) {
        const float zero = zero_of<kBlocks>(s, scale);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float now = top[half];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                float most = s[8 * block][2 * half];
#pragma unroll
                for (int t = 8 * block; t < 8 * block + 8; ++t) most = fmaxf(most, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
                now = fmaxf(now, (most - zero) * scale[block]);
            }
            now = quad_max(now);
            rescale[half] = exp2_approx(top[half] - now);
            top[half] = now;
            sum[half] *= rescale[half];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const float offset = fmaf(-zero, scale[block], kLog2Reference - now);
                float total = 0.0f;
#pragma unroll
                for (int t = 8 * block; t < 8 * block + 8; ++t) {
                    s[t][2 * half] = exp2_approx(fmaf(s[t][2 * half], scale[block], offset));
                    s[t][2 * half + 1] = exp2_approx(fmaf(s[t][2 * half + 1], scale[block], offset));
                    total += s[t][2 * half] + s[t][2 * half + 1];
                }
                // What rounding `offset` left out. P cannot tell, the lse can.
                const float missed = fmaf(-zero, scale[block], -offset) + (kLog2Reference - now);
                sum[half] = fmaf(total, fmaf(missed, kLn2, 1.0f), sum[half]);
            }
        }
    }

private:
    // What scores lie on top of. An offset rounded to 2^16 * 2^-24 moves P by less than 0.3%; where it would be
    // larger, the scores are set on 0 first.
    template <int kBlocks>
    DEVICE static float zero_of(float (&s)[8 * kBlocks][4], const float (&scale)[kBlocks]) {
        float largest = scale[0];
#pragma unroll
        for (int block = 1; block < kBlocks; ++block) largest = fmaxf(largest, scale[block]);
        if (largest * kScoreZero < 65536.0f) return kScoreZero;
#pragma unroll
        for (int t = 0; t < 8 * kBlocks; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[t][i] -= kScoreZero;
        return 0.0f;
    }
};
