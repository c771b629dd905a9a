// Softmax over the int8 scores of one step.
//
// Probabilities are made relative to a reference, at which they are 128; it moves only when some score would come near
// 448, the end of FP8. So scores may grow by a factor of 3.4 in e^score before a maximum is looked for across lanes and
// the output rescaled: for the first step of a row, and few after it.
#pragma once
#include "common/softmax.cuh"
#include "portable/sage_fp8.cuh"

constexpr i32 kMaskedScore = i32(0x80000000);

struct LazySageSoftmax {
    static constexpr float kLog2Reference = 7.0f;
    static constexpr float kSlack = 1.8f;               // 2^(7 + 1.8) < 448

    float top[2] = {NEG_INF, NEG_INF};  // the reference, times log2(e)
    float sum[2] = {0.0f, 0.0f};        // this thread's share, times 128

    // True: the references of this warp's rows have moved, and what was accumulated must be multiplied by `rescale`.
    // scale: score to log2 units, per block.
    DEVICE bool follow(const i32 (&s)[16][4], const float (&scale)[2], float (&rescale)[2]) {
        float most[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) most[half] = fmaxf(float(largest(s, 0, half)) * scale[0], float(largest(s, 8, half)) * scale[1]);
        const bool moves = __any_sync(~0u, most[0] > top[0] + kSlack || most[1] > top[1] + kSlack);
        if (moves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float now = quad_max(fmaxf(top[half], most[half]));
                rescale[half] = exp2_approx(top[half] - now);
                top[half] = now;
                sum[half] *= rescale[half];
            }
        }
        return moves;
    }

    // p becomes P * 128 in FP8, as A operands of 32 keys, four consecutive slots of V a register.
    template <bool kMasked, bool kSum>
    DEVICE void exponentiate(u32 (&p)[4][4], const i32 (&s)[16][4], const float (&scale)[2]) {
#pragma unroll
        for (int t = 0; t < 16; t += 2)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const i32 score = s[t + i / 2][2 * half + i % 2];
                    x[i] = exp2_approx(fmaf(float(score), scale[t / 8], kLog2Reference - top[half]));
                    if (kMasked && score == kMaskedScore) x[i] = 0.0f;
                }
                if (kSum) sum[half] += (x[0] + x[1]) + (x[2] + x[3]);
                p[t / 4][t % 4 + half] = pack_e4m3x4(x[0], x[1], x[2], x[3]);
            }
    }

private:
    DEVICE static i32 largest(const i32 (&s)[16][4], int first, int half) {
        i32 most = s[first][2 * half];
#pragma unroll
        for (int t = first; t < first + 8; ++t) most = max(max(s[t][2 * half], s[t][2 * half + 1]), most);
        return most;
    }
};
