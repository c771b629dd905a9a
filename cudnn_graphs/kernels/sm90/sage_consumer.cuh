// The consumer: one warpgroup, 64 queries at a time, INT8 wgmma for Q.K^T and FP8 wgmma with P in registers for P.V.
#pragma once
#include "portable/sage_fp8.cuh"
#include "sm90/sage_plan.cuh"
#include "sm90/sage_wgmma.cuh"

template <bool kInterleaved>
struct SageConsumer {
    using Scores = i32[8][4];
    const SageParams& p;
    SageLane& lane;
    SageSignals& signals;
    const int index;                                    // among the block's consumers
    const int thread = threadIdx.x % 128;
    RingCursor<2> queries{};
    RingCursor<SagePlan::kStages> keys{}, values{};     // the next to be multiplied
    int blocks = 0;                                     // whose probabilities were made
    float o[kSageDim / 8][4], c[kSageDim / 8][4];       // c: P.V of one block, not yet in o
    float rescale[2];                                   // of o, when c is added
    SageSoftmax softmax;

    DEVICE void arrive(u64& barrier) const {
        if (thread % 32 == 0) barrier_arrive(barrier);
    }
    DEVICE void sync() const { named_barrier(1 + index, 128); }
    DEVICE const SageNotes& notes(int block) const { return signals.notes[block % SagePlan::kNotes]; }

    // The last rows of K, where the permuted box would read past them: as the copy engine would have stored them.
    DEVICE void load_last_keys(const SageItem& item, const SageNotes& block) const {
        for (int i = 0; i < 4; ++i) {
            const int row = thread / 8 + 16 * i, unit = thread % 8;
            const int token = block.id * kSageBlock + SageTile<kInterleaved>::token(row);
            const u8* source = p.k + (i64(item.head) * p.seq_len_k + token) * kSageDim + unit * 16;
            const uint4 bytes = token < p.seq_len_k ? *reinterpret_cast<const uint4*>(source) : uint4{};
            *reinterpret_cast<uint4*>(lane.keys[keys.slot()] + row * 128 + (unit ^ (row & 7)) * 16) = bytes;
        }
        fence_async_proxy();
        sync();
    }

    // Waits for the keys of the next block in the ring, the block'th in all.
    DEVICE void await_keys(const SageItem& item, int block) const {
        barrier_wait(signals.keys_full[keys.slot()], keys.phase());
        if (!kInterleaved && notes(block).flags & kPastEnd) load_last_keys(item, notes(block));
    }

    // Starts Q.K^T with the next block in the ring.
    DEVICE void start_scores(Scores& s) const {
        const u64 q = k_major_operand(smem_address(lane.queries[queries.slot()])), k = k_major_operand(smem_address(lane.keys[keys.slot()]));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSageDim / 32; ++step) wgmma_s8(s, q + operand_bytes(32 * step), k + operand_bytes(32 * step), step > 0);
        wgmma_commit();
    }

    DEVICE void mask(float (&s)[8][4], int valid) const {
        const int column = recomputed(thread) % 4 * 2;
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (SageTile<kInterleaved>::token(8 * t + column + i % 2) >= valid) s[t][i] = NEG_INF;
    }

    // `mine` has the scores of this block. Those of the next one, into `next`, and P.V of the last one, into c, are
    // computed meanwhile. False: this was the row's last block.
    DEVICE bool attend(Scores& mine, Scores& next, const SageItem& item, bool first) {
        const SageNotes note = notes(blocks);
        const bool last = note.flags & kLastOfRow;
        if (!last) await_keys(item, blocks + 1);
        start_scores(next);                             // after the last block of nothing in particular: a branch here would serialize

        float s[8][4];
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[t][i] = __int_as_float(mine[t][i] + i32(kScoreBits));
        if (note.valid < kSageBlock) mask(s, note.valid);
        const float scale[1] = {signals.scales[queries.slot()].q[recomputed(thread) / 64] * note.scale};
        float rescale_now[2];
        softmax.step<1>(s, scale, rescale_now);
        u32 a[2][4];                                    // P in FP8, four consecutive slots of V a register
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = 4 * step + i / 2 * 2, h = i % 2 * 2;
                a[step][i] = pack_e4m3x4(s[t][h], s[t][h + 1], s[t + 1][h], s[t + 1][h + 1]);
            }

        wgmma_wait<0>();
        keep_order(next);
        keep_order(c);
        if (!last) release_keys();
        if (!first) release_values();
        accumulate();
        rescale[0] = rescale_now[0];
        rescale[1] = rescale_now[1];

        barrier_wait(signals.values_full[values.slot()], values.phase());
        if (note.valid < kSageBlock) {
            clear_invisible<kInterleaved>(lane.values[values.slot()], recomputed(thread), note.valid);
            fence_async_proxy();
            sync();
        }
        const u64 v = narrow_operand(smem_address(lane.values[values.slot()]));
        wgmma_fence();
        wgmma_e4m3(c, a[0], v, 0);
        wgmma_e4m3(c, a[1], v + operand_bytes(32), 1);
        wgmma_commit();
        ++blocks;
        return !last;
    }

    DEVICE void release_keys() {
        arrive(signals.keys_empty[keys.slot()]);
        keys.advance();
    }
    DEVICE void release_values() {
        arrive(signals.values_empty[values.slot()]);
        values.advance();
    }

    // The tensor cores keep about 14 bits along a chain, so a chain is one block of 64 keys; the sum of blocks is fp32.
    DEVICE void accumulate() {
#pragma unroll
        for (int t = 0; t < kSageDim / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][i] = fmaf(o[t][i], rescale[i / 2], c[t][i]);
    }

    DEVICE void attend_row(const SageItem& item) {
        softmax = {};
        rescale[0] = rescale[1] = 1.0f;
#pragma unroll
        for (int t = 0; t < kSageDim / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][i] = c[t][i] = 0.0f;
        barrier_wait(signals.queries_full[queries.slot()], queries.phase());
        barrier_wait(signals.keys_full[keys.slot()], keys.phase());
        if (notes(blocks).valid > 0) {
            Scores even, odd;
            await_keys(item, blocks);
            start_scores(even);
            wgmma_wait<0>();
            keep_order(even);
            release_keys();
            for (bool first = true; attend(even, odd, item, first) && attend(odd, even, item, false); first = false) {}
            wgmma_wait<0>();
            keep_order(c);
            accumulate();
        } else {
            release_keys();
            ++blocks;
        }
        release_values();
        SageRows(p, item, thread / 32).store(o, softmax, 1.0f, signals.scales[queries.slot()].v);
        arrive(signals.queries_empty[queries.slot()]);
        queries.advance();
    }
};
