// What a warp does with its 16 query rows before the first and after the last key: the A operand of Q.K^T,
// and the normalized output.
#pragma once
#include "common/sage_params.cuh"
#include "common/softmax.cuh"

// The 16 rows of one warp; this thread holds rows `first` and `first` + 8 of the head's tokens.
struct SageRows {
    const SageParams& p;
    i32 head, first;
    bool live[2];

    DEVICE SageRows(const SageParams& params, const SageItem& item, int warp)
        : p(params), head(item.head), first(item.row * kSageBlock + 16 * warp + threadIdx.x % 32 / 4) {
        live[0] = first < p.seq_len_q;
        live[1] = first + 8 < p.seq_len_q;
    }
    DEVICE i64 token(int half) const { return i64(head) * p.seq_len_q + first + 8 * half; }

    // One scale serves 32 tokens, so the whole warp.
    DEVICE float score_scale() const { return p.q_scale[i64(head) * (ceil_div(p.seq_len_q, 128) * 4) + first / 32] * p.scale_log2; }

    // o: 16 x 128 accumulators, `o_scale` times too small, relative to the softmax's top. v_scale: of this head. A row that
    // saw no key is 0, lse -inf.
    template <typename Softmax>
    DEVICE void store(const float (&o)[kSageDim / 8][4], const Softmax& softmax, float o_scale, const float* v_scale) const {
        const int column = threadIdx.x % 4 * 2;
        v_scale += column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(softmax.sum[half]);
            const bool empty = sum == 0.0f;             // not by the top: scores that are all NaN leave that at -inf, and must show
            if (!live[half]) continue;
            const float factor = o_scale / sum;
            u32* out = p.out + token(half) * (kSageDim / 2) + column / 2;
#pragma unroll
            for (int t = 0; t < kSageDim / 8; ++t) {
                const float x = o[t][2 * half] * (factor * v_scale[8 * t]), y = o[t][2 * half + 1] * (factor * v_scale[8 * t + 1]);
                out[4 * t] = empty ? 0 : pack2<bf16>(x, y);
            }
            if (p.lse != nullptr && threadIdx.x % 4 == 0)
                p.lse[token(half)] = empty ? NEG_INF : (softmax.top[half] + (log2_approx(sum) - Softmax::kLog2Reference)) * kLn2;
        }
    }
};
