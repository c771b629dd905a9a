// The producer: block lists become bulk copies, row after row.
#pragma once
#include "sm90/sage_plan.cuh"

DEVICE void load_box(u32 to, const TensorMap& map, u64& barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(&map), "r"(smem_address(&barrier)), "r"(x), "r"(y) : "memory");
}
DEVICE void load_permuted_box(u32 to, const TensorMap& map, u64& barrier, int row) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %3, %3}], [%2];"
                 ::"r"(to), "l"(&map), "r"(smem_address(&barrier)), "r"(0), "r"(row) : "memory");
}

// Every map sees all heads as one array of rows, so a head of any length starts anywhere. Natural V wants K's rows
// permuted, and the copy engine does it: a box (128, 2, 4, 2, 4) over dimensions of strides 1 byte and 1, 4, 2, 16 rows.
template <bool kInterleaved>
struct SageProducer {
    const SageParams& p;
    const SageMaps& maps;
    SageLane& lane;
    SageSignals& signals;
    RingCursor<2> queries{};
    RingCursor<SagePlan::kStages> at{};
    int blocks = 0;             // loaded so far
    int rows = 0;

    DEVICE static bool elected() { return threadIdx.x % 32 == 0; }

    // A ring's slot is free at first; later, when its consumer's warps have said so. Phases lag by one trip.
    DEVICE void load_row(const SageItem& item) {
        if (rows++ >= 2) barrier_wait(signals.queries_empty[queries.slot()], queries.phase() ^ 1);
        store_scales(item, signals.scales[queries.slot()]);
        __syncwarp();
        if (elected()) {
            barrier_arrive_expect(signals.queries_full[queries.slot()], SagePlan::kTileBytes);
            load_box(smem_address(lane.queries[queries.slot()]), maps.queries, signals.queries_full[queries.slot()], 0, item.head * p.seq_len_q + item.row * kSageBlock);
        }
        queries.advance();
        SageBlockReader reader(p, item);
        SageBlock block = reader.next();
        bool last;
        do {
            const SageBlock next = reader.next();
            last = next.valid == 0;
            load_block(item, block, last);
            block = next;
        } while (!last);
    }

    DEVICE void store_scales(const SageItem& item, SageRowScales& scales) const {
        const int lane = threadIdx.x % 32;
        reinterpret_cast<float4*>(scales.v)[lane] = reinterpret_cast<const float4*>(p.v_scale + i64(item.head) * kSageDim)[lane];
        const i32 per_head = ceil_div(p.seq_len_q, 128) * 4;
        if (lane < 2) scales.q[lane] = p.q_scale[i64(item.head) * per_head + 2 * item.row + lane] * p.scale_log2;
    }

    DEVICE void load_block(const SageItem& item, const SageBlock& block, bool last) {
        const bool reused = blocks >= SagePlan::kStages;
        const int slot = at.slot(), row = item.head * p.seq_len_k + block.id * kSageBlock;
        const bool past_end = !kInterleaved && row > p.batch_heads * p.seq_len_k - kSageBlock;
        const bool copied = block.valid > 0 && !past_end;
        if (reused) barrier_wait(signals.keys_empty[slot], at.phase() ^ 1);
        if (elected()) {
            signals.notes[blocks % SagePlan::kNotes] = {block.id, block.valid, block.scale, (last ? kLastOfRow : 0) | (past_end ? kPastEnd : 0)};
            barrier_arrive_expect(signals.keys_full[slot], copied ? SagePlan::kTileBytes : 0);
            if (copied) {
                const u32 to = smem_address(lane.keys[slot]);
                if (kInterleaved) load_box(to, maps.keys, signals.keys_full[slot], 0, row);
                else load_permuted_box(to, maps.keys, signals.keys_full[slot], row);
            }
        }
        if (reused) barrier_wait(signals.values_empty[slot], at.phase() ^ 1);
        if (elected()) {
            barrier_arrive_expect(signals.values_full[slot], block.valid > 0 ? SagePlan::kTileBytes : 0);
            if (block.valid > 0) load_box(smem_address(lane.values[slot]), maps.values, signals.values_full[slot], block.id * kSageBlock, item.head * kSageDim);
        }
        __syncwarp();
        at.advance();
        ++blocks;
    }
};
