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
    SagePair& shared;
    SageSignals& signals;
    u32 rows = 0, steps = 0;    // loaded so far

    DEVICE static bool elected() { return threadIdx.x % 32 == 0; }

    // Two blocks a step. What a barrier guards is free at first; later, when its consumer's warps have said so.
    DEVICE void load_row(const SageItem& item) {
        if (rows > 0) barrier_wait(signals.queries_empty, rows - 1 & 1);
        store_scales(item, signals.scales[rows % 2]);
        __syncwarp();
        if (elected()) {
            barrier_arrive_expect(signals.queries_full, SagePlan::kTileBytes);
            load_box(smem_address(shared.queries), maps.queries, signals.queries_full, 0, item.head * p.seq_len_q + item.row * kSageBlock);
        }
        ++rows;
        SageBlockReader reader(p, item);
        SageBlock first = reader.next();
        bool last;
        do {
            SageBlock second = reader.next(), next;
            if (second.valid > 0) next = reader.next();
            last = next.valid == 0;
            load_step(item, first, second, last);
            first = next;
        } while (!last);
    }

    DEVICE void store_scales(const SageItem& item, SageRowScales& scales) const {
        const int lane = threadIdx.x % 32;
        reinterpret_cast<float4*>(scales.v)[lane] = reinterpret_cast<const float4*>(p.v_scale + i64(item.head) * kSageDim)[lane];
        const i32 per_head = ceil_div(p.seq_len_q, 128) * 4;
        if (lane < 2) scales.q[lane] = p.q_scale[i64(item.head) * per_head + 2 * item.row + lane] * p.scale_log2;
    }

    // The last rows of K, where the permuted box would read past them: stored as the copy engine would have.
    DEVICE void store_last_keys(u8* tile, const SageItem& item, int block) const {
        const int unit = threadIdx.x % 8;
#pragma unroll 1
        for (int row = threadIdx.x % 32 / 8; row < kSageBlock; row += 4) {
            const int token = block * kSageBlock + SageTile<kInterleaved>::token(row);
            const u8* source = p.k + (i64(item.head) * p.seq_len_k + token) * kSageDim + unit * 16;
            const uint4 bytes = token < p.seq_len_k ? *reinterpret_cast<const uint4*>(source) : uint4{};
            *reinterpret_cast<uint4*>(tile + row * 128 + (unit ^ (row & 7)) * 16) = bytes;
        }
        fence_async_proxy();
        __syncwarp();
    }

    // True: the permuted box would read past the last row of K.
    DEVICE bool past_end(int row, const SageBlock& block) const { return !kInterleaved && block.valid > 0 && row > p.batch_heads * p.seq_len_k - kSageBlock; }

    DEVICE void load_step(const SageItem& item, const SageBlock& first, const SageBlock& second, bool last) {
        const bool reused = steps >= SagePlan::kStages;
        const u32 slot = steps % SagePlan::kStages, phase = steps / SagePlan::kStages - 1 & 1;
        if (reused) barrier_wait(signals.keys_empty[slot], phase);
        const i32 bytes = store_if_past_end(item, first, shared.keys[slot][0]) + store_if_past_end(item, second, shared.keys[slot][1]);
        if (elected()) {
            signals.notes[steps % SagePlan::kNotes] = {{first.scale, second.scale}, {short(first.valid), short(second.valid)}, last};
            barrier_arrive_expect(signals.keys_full[slot], bytes);
            load_keys(item, first, shared.keys[slot][0], signals.keys_full[slot]);
            load_keys(item, second, shared.keys[slot][1], signals.keys_full[slot]);
        }
        if (reused) barrier_wait(signals.values_empty[slot], phase);
        if (elected()) {
            barrier_arrive_expect(signals.values_full[slot], ((first.valid > 0) + (second.valid > 0)) * SagePlan::kTileBytes);
            load_values(item, first, shared.values[slot][0], signals.values_full[slot]);
            load_values(item, second, shared.values[slot][1], signals.values_full[slot]);
        }
        __syncwarp();
        ++steps;
    }

    DEVICE int key_row(const SageItem& item, const SageBlock& block) const { return item.head * p.seq_len_k + block.id * kSageBlock; }

    // How many bytes are still to be copied.
    DEVICE i32 store_if_past_end(const SageItem& item, const SageBlock& block, u8* tile) const {
        if (past_end(key_row(item, block), block)) {
            store_last_keys(tile, item, block.id);
            return 0;
        }
        return block.valid > 0 ? SagePlan::kTileBytes : 0;
    }

    DEVICE void load_keys(const SageItem& item, const SageBlock& block, u8* tile, u64& barrier) const {
        const int row = key_row(item, block);
        if (block.valid == 0 || past_end(row, block)) return;
        if (kInterleaved) load_box(smem_address(tile), maps.keys, barrier, 0, row);
        else load_permuted_box(smem_address(tile), maps.keys, barrier, row);
    }

    DEVICE void load_values(const SageItem& item, const SageBlock& block, u8* tile, u64& barrier) const {
        if (block.valid > 0) load_box(smem_address(tile), maps.values, barrier, block.id * kSageBlock, item.head * kSageDim);
    }
};
