// The consumer: one warpgroup, 64 queries at a time, INT8 wgmma for Q.K^T and FP8 wgmma with P in registers for P.V.
#pragma once
#include "portable/sage_fp8.cuh"
#include "sm90/sage_plan.cuh"
#include "sm90/sage_softmax.cuh"
#include "sm90/sage_wgmma.cuh"

// kLse: sums of P are of fp32 numbers. Otherwise the tensor cores sum what they multiply, P in FP8: 64 instructions of a step less.
template <bool kInterleaved, bool kLse>
struct SageConsumer {
    using Scores = i32[16][4];
    const SageParams& p;
    SagePair& shared;
    SageSignals& signals;
    const int index;                                    // among the block's consumers
    const int thread = threadIdx.x % 128;
    u32 rows = 0, steps = 0;                            // finished
    float o[kSageDim / 8][4];
    LazySageSoftmax softmax;

    DEVICE u32 slot() const { return steps % SagePlan::kStages; }
    DEVICE u32 phase() const { return steps / SagePlan::kStages & 1; }
    // One arrival a warp, without a branch.
    DEVICE void arrive(u64& barrier) const {
        asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(smem_address(&barrier)), "r"(thread % 32) : "memory");
    }

    DEVICE void attend_row() {
        softmax = {};
#pragma unroll
        for (int t = 0; t < kSageDim / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][i] = 0.0f;
        barrier_wait(signals.queries_full, rows & 1);
        barrier_wait(signals.keys_full[slot()], phase());
        if (signals.notes[steps % SagePlan::kNotes].valid[0] > 0) {
            Scores s;
            bool first = true;
            while (attend(s, first)) {}
        } else {
            skip();
        }
        SageRows(p, SageItem(p, i32(row_index(rows, index))), thread / 32).store(o, softmax, 1.0f, signals.scales[rows % 2].v);
        ++rows;
    }

    // A row without any block.
    DEVICE void skip() {
        arrive(signals.keys_empty[slot()]);
        arrive(signals.queries_empty);
        arrive(signals.values_empty[slot()]);
        ++steps;
    }

    // One step. False: the row's last.
    DEVICE bool attend(Scores& s, bool& first) {
        barrier_wait(signals.keys_full[slot()], phase());
        start_scores(s);
        const SageNotes note = signals.notes[steps % SagePlan::kNotes];
        const float q_scale = signals.scales[rows % 2].q[thread / 64], scale[2] = {q_scale * note.scale[0], q_scale * note.scale[1]};
        const bool partial = min(note.valid[0], note.valid[1]) < kSageBlock;
        wgmma_wait<0>();
        keep_order(s);
        arrive(signals.keys_empty[slot()]);
        if (note.last) arrive(signals.queries_empty);
        if (__builtin_expect(partial, false)) {
            mask(s, 0, note.valid[0]);
            mask(s, 8, note.valid[1]);
        }
        float rescale[2];
        if (__builtin_expect(softmax.follow(s, scale, rescale) && !first, false)) {
#pragma unroll
            for (int t = 0; t < kSageDim / 8; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[t][i] *= rescale[i / 2];
        }
        first = false;
        u32 a[4][4];
        if (__builtin_expect(partial, false)) softmax.exponentiate<true, kLse>(a, s, scale);
        else softmax.exponentiate<false, kLse>(a, s, scale);
        barrier_wait(signals.values_full[slot()], phase());
        if (__builtin_expect(partial, false)) {
            clear_invisible<kInterleaved>(shared.values[slot()][0], recomputed(thread), note.valid[0]);
            clear_invisible<kInterleaved>(shared.values[slot()][1], recomputed(thread), note.valid[1]);
            fence_async_proxy();
            named_barrier(1 + index, 128);
        }
        add_values(a);
        arrive(signals.values_empty[slot()]);
        ++steps;
        return !note.last;
    }

    DEVICE void start_scores(Scores& s) const {
        const u64 q = k_major_operand(smem_address(shared.queries)), k = k_major_operand(smem_address(shared.keys[slot()]));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSageDim / 32; ++step) {
            if (step == 0) wgmma_s8<true>(s, q, k);
            else wgmma_s8<false>(s, q + operand_bytes(32 * step), k + operand_bytes(32 * step));
        }
        wgmma_commit();
    }

    // The tensor cores keep about 14 bits along a chain, so a chain is one step; the sum of steps is fp32.
    DEVICE void add_values(const u32 (&a)[4][4]) {
        constexpr int kColumns = kLse ? kSageDim : kSageDim + 8;
        float c[kColumns / 8][4];
        const u64 v = narrow_operand(smem_address(shared.values[slot()]));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const u64 keys = v + operand_bytes(step / 2 * sizeof(shared.values[0][0]) + step % 2 * 32);
            if (step == 0) wgmma_e4m3<kColumns, true>(c, a[step], keys);
            else wgmma_e4m3<kColumns, false>(c, a[step], keys);
        }
        wgmma_commit();
        wgmma_wait<0>();
        keep_order(c);
#pragma unroll
        for (int t = 0; t < kSageDim / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][i] += c[t][i];
        if constexpr (!kLse) {
            softmax.sum[0] += c[kSageDim / 8][0];
            softmax.sum[1] += c[kSageDim / 8][2];
        }
    }

    DEVICE void mask(Scores& s, int first, int valid) const {
        const int column = recomputed(thread) % 4 * 2;
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (SageTile<kInterleaved>::token(8 * t + column + i % 2) >= valid) s[first + t][i] = kMaskedScore;
    }
};
