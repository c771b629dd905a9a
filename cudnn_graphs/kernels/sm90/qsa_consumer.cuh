// The computing warpgroups: S = Q.K^T of a step is issued before P.V of the one before it, so that the softmax
// of one step runs under the tensor core work of the other.
//
// A key that one query of a tile attends and another does not meets a probability of 0 in the other's row, and
// 0 x NaN is NaN. Nothing scans values for that: any non-finite value of a tile makes every row of it
// non-finite, so the accumulators tell at the end, and the item is left to the exact per-query kernel.
#pragma once
#include "sm90/lazy_softmax.cuh"
#include "sm90/qsa_plan.cuh"
#include "sm90/wgmma.cuh"

template <typename Plan>
struct Consumer {
    const QsaParams& p;
    const int lane = threadIdx.x % 32;
    u32 step = 0;                   // whose scores are being made; its values are used one step later
    u32 items = 0;
    float out[2][16][4];            // channels 0..127 and 128..255
    u32 probabilities[4][4];        // of 16 keys each
    LazySoftmax softmax;

    DEVICE Consumer(const QsaParams& params) : p(params) {}

    static DEVICE QsaUnionMemory<Plan>& memory() { return qsa_memory<Plan>(); }
    static DEVICE int wg() { return threadIdx.x / 128; }
    // The first of this thread's two rows, of 64; the other is 8 on.
    static DEVICE int row() { return row_of(threadIdx.x); }
    static DEVICE int row_of(int thread) { return thread / 32 % 4 * 16 + thread % 32 / 4; }
    DEVICE const StepNotes<Plan>& notes() const { return memory().steps[slot_of<Plan::kSteps>(step)]; }
    DEVICE void await_step() const { barrier_wait(memory().step_full[slot_of<Plan::kSteps>(step)], trip_of<Plan::kSteps>(step)); }

    DEVICE void run() {
        while (true) {
            await_step();
            if (notes().flags & kNoMoreWork) break;
            const int item = notes().item;
            attend();
            store(item);
        }
    }

    DEVICE void arrive(u64& barrier) {
        if (lane == 0) barrier_arrive(barrier);
    }

    DEVICE void attend() {
        float s[8][4];
        softmax = {};
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][j][i] = 0.f;
        barrier_wait(memory().queries_full, items++ & 1);
        issue_scores(s);
        wgmma_wait<0>();
        keep_order(s);
        bool last = finish_scores();
        mask(s);
        softmax.step(s, p.scale_log2);
        pack(s);
        leave_step();
        while (!last) {
            await_step();
            issue_scores(s);
            issue_values(step - 1);
            wgmma_wait<1>();
            keep_order(s);
            last = finish_scores();
            mask(s);
            const bool moved = softmax.step(s, p.scale_log2);
            leave_step();
            wgmma_wait<0>();
            finish_values(step - 2);
            if (moved) scale_out();
            pack(s);
        }
        issue_values(step - 1);
        wgmma_wait<0>();
        finish_values(step - 1);
    }

    DEVICE void issue_scores(float (&s)[8][4]) {
        const u32 slot = slot_of<Plan::kStages>(step);
        barrier_wait(memory().keys_full[slot], trip_of<Plan::kStages>(step));
        fence_async_proxy();        // the keys came by ordinary copies
        // From lane 0, so that the compiler knows it is the same in the warp: sixteen operands then differ by constants in
        // uniform registers. Else each takes a pair of ordinary ones and two moves, 70 instructions a step.
        const u32 queries = __shfl_sync(~0u, smem_address(memory().queries[wg()]), 0);
        const u64 a = k_major_operand(queries), b = k_major_operand(smem_address(memory().keys[slot]));
        wgmma_fence();
        wgmma_ss<bf16, 64, true>(s, a, b);
#pragma unroll
        for (int i = 1; i < kQsaDim / 16; ++i) {
            const u64 at = operand_bytes(i / 4 * Plan::kColumnBytes + i % 4 * 32);
            wgmma_ss<bf16, 64, false>(s, a + at, b + at);
        }
        wgmma_commit();
    }

    // Gives back what S was made from; whether that was the item's last step.
    DEVICE bool finish_scores() {
        arrive(memory().keys_empty[slot_of<Plan::kStages>(step)]);
        const bool last = notes().flags & kLastStep;
        if (last) arrive(memory().queries_empty);
        return last;
    }

    DEVICE void leave_step() {
        __syncwarp();
        arrive(memory().step_empty[slot_of<Plan::kSteps>(step++)]);
    }

    // Of step `of`.
    DEVICE void issue_values(u32 of) {
        const u32 slot = slot_of<Plan::kStages>(of);
        barrier_wait(memory().values_full[slot], trip_of<Plan::kStages>(of));
        fence_async_proxy();
        const u64 b = n_major_operand(smem_address(memory().values[slot]), Plan::kColumnBytes);
        keep_order(out[0]);
        keep_order(out[1]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Plan::kKeys / 16; ++i) {
            wgmma_rs<bf16, 128, false, 1>(out[0], probabilities[i], b + operand_bytes(i * 2048));
            wgmma_rs<bf16, 128, false, 1>(out[1], probabilities[i], b + operand_bytes(i * 2048 + 2 * Plan::kColumnBytes));
        }
        wgmma_commit();
    }

    DEVICE void finish_values(u32 of) {
        keep_order(out[0]);
        keep_order(out[1]);
        arrive(memory().values_empty[slot_of<Plan::kStages>(of)]);
    }

    // A bit for each of this thread's sixteen keys of row `half`.
    DEVICE u32 seen_by(int half) const {
        const int query = (row() + 8 * half) / Plan::kGroup;
        return query < Plan::kWgQueries ? notes().rows[wg() * Plan::kWgQueries + query][lane % 4] : 0;
    }

    DEVICE void mask(float (&s)[8][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 seen = seen_by(half);
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) s[j][2 * half + i] = seen & 1u << (2 * j + i) ? s[j][2 * half + i] : NEG_INF;
        }
    }

    DEVICE void pack(const float (&s)[8][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            probabilities[i][0] = pack2<bf16>(s[2 * i][0], s[2 * i][1]);
            probabilities[i][1] = pack2<bf16>(s[2 * i][2], s[2 * i][3]);
            probabilities[i][2] = pack2<bf16>(s[2 * i + 1][0], s[2 * i + 1][1]);
            probabilities[i][3] = pack2<bf16>(s[2 * i + 1][2], s[2 * i + 1][3]);
        }
    }

    DEVICE void scale_out() {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][j][i] *= softmax.rescale[i / 2];
    }

    DEVICE void store(int item) {
        float probe = 0.f;          // stays 0 unless an accumulator is NaN or Inf
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) probe = fmaf(out[n][j][i], 0.f, probe);
        const bool tainted = __any_sync(~0u, !(probe == 0.f));
        if (tainted && lane == 0 && atomicExch(p.item_mode + item, kTaintedMode) == kUnionMode) leave_to_gather(p, item);
        const int row = row_of(thread_index_again());       // anew: kept across the loop it would be spilled
#pragma unroll
        for (int half = 0; half < 2; ++half) store_row(item, half, row + 8 * half);
    }

    DEVICE void store_row(int item, int half, int m) {
        const float total = quad_sum(softmax.sum[half]), inverse = total == 0.f ? 0.f : 1.f / total;
        const int query = m / Plan::kGroup, t = item / p.num_kv_heads * Plan::kQueries + wg() * Plan::kWgQueries + query;
        if (query >= Plan::kWgQueries || t >= p.num_tokens) return;
        const int heads = p.num_kv_heads * Plan::kGroup, head = item % p.num_kv_heads * Plan::kGroup + m % Plan::kGroup;
        const i64 at = (i64(t) * heads + head) * kQsaDim + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float x = out[n][j][2 * half] * inverse, y = out[n][j][2 * half + 1] * inverse;
                *reinterpret_cast<float2*>(p.out_fp32 + at + n * 128 + j * 8) = make_float2(x, y);
                *reinterpret_cast<u32*>(p.out + at + n * 128 + j * 8) = pack2<bf16>(x, y);
            }
        if (lane % 4 == 0) p.lse[i64(head) * p.num_tokens + t] = total == 0.f ? NEG_INF : (softmax.top[half] + log2_approx(total)) * kLn2;
    }
};
