// Paged block-sparse attention on Hopper: a producer and one or two consumer warpgroups, a ring of tiles between them.
//
// A consumer issues Q.K^T of tile i + 1 and P.V of tile i together, and makes probabilities of i + 1 while the tensor
// cores work on P.V and on the other consumer's products. Partial tiles differ by a mask before the softmax and a
// cleaning of V after it.
#pragma once
#include "sm90/lazy_softmax.cuh"
#include "sm90/paged_exact.cuh"
#include "sm90/paged_load.cuh"
#include "sm90/paged_plan.cuh"
#include "sm90/paged_store.cuh"
#include "sm90/wgmma.cuh"

template <typename Plan>
struct Consumer {
    using T = typename Plan::Element;
    static constexpr int kKeys = Plan::kKeys;
    using Cursor = RingCursor<Plan::kStages>;

    const PagedParams& p;
    PagedMemory<Plan>& memory;
    Cursor tile{};                                  // whose scores are next, in both rings; its notes lie at `at`
    u32 done = 0;                                   // items: gives the slots and phases of what comes once per item

    float s[kKeys / 8][4];                          // scores, then probabilities
    u32 probabilities[kKeys / 16][4];               // the same, rounded, as operand A of P.V
    u32 queries[Plan::kQueriesInRegisters ? Plan::kHeadDim / 16 : 1][4];
    float o[Plan::kChunks][Plan::kChunk / 8][4];
    LazySoftmax softmax;

    DEVICE Consumer(const PagedParams& params, PagedMemory<Plan>& shared) : p(params), memory(shared) {}

    // First of a thread's two rows in the block.
    DEVICE static int row_of(int thread_index) { return thread_index / 32 * 16 + thread_index % 32 / 4; }

    // Waits for the next item. False: there are no more.
    DEVICE bool next_row() {
        barrier_wait(memory.row_full[done % 2], done / 2 % 2);
        return row_notes().tiles >= 0;
    }

    // Everything of the item up to, not including, the store.
    DEVICE void attend() {
        const int tiles = row_notes().tiles;
        softmax = LazySoftmax();
        clear_output();
        take_queries(tiles);
        if (tiles == 0) return;
        first_tile(tiles == 1);
        for (int left = tiles - 2; left >= 0; --left) next_tile(left == 0);
        await_values(tile.before());
        issue_values(tile.before());
        finish_values(tile.before());
    }

    DEVICE const RowNotes& row_notes() const { return memory.rows[done % 2]; }
    DEVICE void finish_row() {
        release(memory.row_empty[done % 2]);
        ++done;
    }

private:
    DEVICE void clear_output() {
#pragma unroll
        for (int c = 0; c < Plan::kChunks; ++c)
#pragma unroll
            for (int j = 0; j < Plan::kChunk / 8; ++j) o[c][j][0] = o[c][j][1] = o[c][j][2] = o[c][j][3] = 0.f;
    }

    DEVICE void take_queries(int tiles) {
        barrier_wait(memory.queries_full, done % 2);
        if constexpr (Plan::kQueriesInRegisters) {
            const int index = thread_index_again(), lane = index % 32, row = index % 128 / 32 * 16 + lane % 16;
            const u32 at = smem_address(memory.queries[index / 128]) + row * 128;
#pragma unroll
            for (int k = 0; k < Plan::kHeadDim / 16; ++k)
                ldmatrix_x4(queries[k], at + k / 4 * Plan::kQueryColumnBytes + ((2 * k + lane / 16) % 8 ^ row % 8) * 16);
        }
        if (Plan::kQueriesInRegisters || tiles == 0) release(memory.queries_empty);
    }

    // Each warp speaks for itself: its own reads are over.
    DEVICE void release(u64& barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }

    // Q.K^T of the next tile, once its keys are there.
    DEVICE void issue_scores() {
        barrier_wait(memory.keys_full[tile.slot()], tile.phase());
        const u64 k = k_major_operand(smem_address(memory.keys[0])) + tile.slot() * operand_bytes(Plan::kTileBytes);
        u64 q = k_major_operand(smem_address(memory.queries[threadIdx.x / 128]));
        asm volatile("" : "+l"(q));                 // else all of its sums with constants are kept, and spilled, across the loop
        wgmma_fence();
        score_products(q, k);
        wgmma_commit();
    }

    // Sixteen of the head's dimensions, and those after.
    template <int kStep = 0>
    DEVICE void score_products(u64 q, u64 k) {
        const u64 b = k + operand_bytes(kStep / 4 * Plan::kColumnBytes + kStep % 4 * 32);
        if constexpr (Plan::kQueriesInRegisters) wgmma_rs<T, kKeys, kStep == 0, 0>(s, queries[kStep], b);
        else wgmma_ss<T, kKeys, kStep == 0>(s, q + operand_bytes(kStep / 4 * Plan::kQueryColumnBytes + kStep % 4 * 32), b);
        if constexpr (16 * (kStep + 1) < Plan::kHeadDim) score_products<kStep + 1>(q, k);
    }

    // Scores are there, keys no longer needed, nor are queries after the row's last tile. True: the tile is partial.
    template <int kPending>
    DEVICE bool finish_scores(bool last) {
        wgmma_wait<kPending>();
        keep_order(s);
        const bool partial = memory.notes[tile.at].partial;
        release(memory.keys_empty[tile.slot()]);
        if (!Plan::kQueriesInRegisters && last) release(memory.queries_empty);
        if (partial) mask();
        return partial;
    }

    DEVICE void await_values(Cursor of) { barrier_wait(memory.values_full[of.slot()], of.phase()); }

    DEVICE void issue_values(Cursor of) {
        const u64 v = n_major_operand(smem_address(memory.values[0]), Plan::kColumnBytes) + of.slot() * operand_bytes(Plan::kTileBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
            for (int c = 0; c < Plan::kChunks; ++c)
                wgmma_rs<T, Plan::kChunk, false, 1>(o[c], probabilities[k], v + operand_bytes(2 * c * Plan::kColumnBytes + k * 2048));
        wgmma_commit();
    }

    DEVICE void finish_values(Cursor of) {
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < Plan::kChunks; ++c) keep_order(o[c]);
        release(memory.values_empty[of.slot()]);
    }

    DEVICE void rescale_output() {
#pragma unroll
        for (int c = 0; c < Plan::kChunks; ++c)
#pragma unroll
            for (int j = 0; j < Plan::kChunk / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[c][j][e] *= softmax.rescale[e / 2];
    }

    DEVICE void round_probabilities() {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) probabilities[k][i] = pack2<T>(s[2 * k + i / 2][2 * (i % 2)], s[2 * k + i / 2][2 * (i % 2) + 1]);
    }

    DEVICE void first_tile(bool last) {
        issue_scores();
        const bool partial = finish_scores<0>(last);
        softmax.step(s, p.scale_log2);              // nothing to rescale yet
        round_probabilities();
        if (partial) clean_values();
        tile.advance();
    }

    // Scores of the next tile, values of the one before.
    DEVICE void next_tile(bool last) {
        const Cursor before = tile.before();
        issue_scores();
        await_values(before);
        issue_values(before);
        const bool partial = finish_scores<1>(last);
        const bool moved = softmax.step(s, p.scale_log2);
        finish_values(before);
        if (moved) rescale_output();
        round_probabilities();
        if (partial) clean_values();
        tile.advance();
    }

    DEVICE void mask() {
        const int index = thread_index_again();
        mask_scores<Plan>(s, memory.notes[tile.at], Sight<Plan>(p, row_notes(), row_of(index)), index % 32);
    }

    // The partial tile's values, before their product.
    DEVICE void clean_values() {
        await_values(tile);
        const int index = thread_index_again(), thread = index % 128, lane = index % 32;
        const Sight<Plan> sight(p, row_notes(), row_of(index));
        u8* values = memory.values[tile.slot()];
        if (!clear_dead_values<Plan>(values, memory.notes[tile.at], sight, thread, kWarpgroupBarrier + index / 128)) return;
        add_seen_values<Plan>(o, probabilities, values, lane);
        clear_nonfinite_values<Plan>(values, thread);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) probabilities[k][0] = probabilities[k][1] = probabilities[k][2] = probabilities[k][3] = 0;
    }
};

template <typename Plan>
DEVICE void init_barriers(PagedMemory<Plan>& memory) {
    constexpr int kConsumerWarps = 4 * Plan::kConsumers;
    for (int i = 0; i < Plan::kStages; ++i) {
        barrier_init(memory.keys_full[i], 1);
        barrier_init(memory.values_full[i], 1);
        barrier_init(memory.keys_empty[i], kConsumerWarps);
        barrier_init(memory.values_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
        barrier_init(memory.row_full[i], 1);
        barrier_init(memory.row_empty[i], kConsumerWarps);
    }
    barrier_init(memory.batch_full, 1);
    barrier_init(memory.batch_empty, 1);
    barrier_init(memory.queries_full, Plan::kQueryThreads);
    barrier_init(memory.queries_empty, kConsumerWarps);
    barrier_init_fence();
}

// Items are dealt round over the blocks; a cluster takes one item at a time.
template <typename Plan>
struct Schedule {
    int items;                                      // of this block
    DEVICE explicit Schedule(const PagedParams& p) {
        const int all = p.batch * p.num_kv_heads * p.rows * WorkItem::items_per_row<Plan::kRows>(p);
        items = ceil_div(all - int(blockIdx.x / Plan::kSplits), int(gridDim.x / Plan::kSplits));
    }
    DEVICE static WorkItem item(const PagedParams& p, int i) {
        return WorkItem::of<Plan::kRows>(p, blockIdx.x / Plan::kSplits + i * (gridDim.x / Plan::kSplits));
    }
};

template <typename Plan>
DEVICE void produce(const PagedParams& p, const TensorMap& key_map, const TensorMap& value_map, PagedMemory<Plan>& memory, int split) {
    const int thread = threadIdx.x - Plan::kConsumerThreads;
    const Schedule<Plan> schedule(p);
    if (thread < 32) {
        KeyValueLoader<Plan>{p, key_map, value_map, memory, thread}.run();
    } else if (thread < 64) {
        Planner<Plan> planner{p, memory, thread - 32, split};
        for (int i = 0; i < schedule.items; ++i) planner.plan(schedule.item(p, i));
        planner.finish();
    } else {
        for (int i = 0; i < schedule.items; ++i) {
            barrier_wait(memory.queries_empty, ~i & 1);
            gather_queries<Plan>(p, memory, schedule.item(p, i), thread - 64);
        }
    }
}

template <typename Plan>
DEVICE void consume(const PagedParams& p, PagedMemory<Plan>& memory, int split) {
    Consumer<Plan> consumer(p, memory);
    while (consumer.next_row()) {
        consumer.attend();
        const WorkItem w = consumer.row_notes().item;
        const bool bad = consumer.row_notes().bad;
        const int index = thread_index_again(), row = consumer.row_of(index), lane = index % 32;
        if constexpr (Plan::kSplits == 1) {
            store_rows<Plan>(p, w, consumer.o, consumer.softmax, bad, row, lane);
        } else {
            auto& partial = reinterpret_cast<PartialResult<Plan>&>(memory.keys);
            named_barrier(kWarpgroupBarrier, 128);      // no warp's products still read keys
            publish_partial<Plan>(partial, w, consumer.o, consumer.softmax, bad, row, lane);
            cluster_barrier();
            merge_cluster<Plan>(p, w, partial, split, index);
            cluster_barrier();
        }
        consumer.finish_row();
    }
}

template <typename Plan>
DEVICE void paged_attention(const PagedParams& p, const TensorMap& key_map, const TensorMap& value_map) {
    extern __shared__ __align__(1024) u8 raw_memory[];
    auto& memory = *reinterpret_cast<PagedMemory<Plan>*>(raw_memory);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(key_map);
        prefetch_tensor_map(value_map);
        init_barriers(memory);
    }
    __syncthreads();
    const int split = Plan::kSplits == 1 ? 0 : cluster_rank();
    if (threadIdx.x >= Plan::kConsumerThreads) {
        if constexpr (Plan::kMovesRegisters) lower_registers<Plan::kProducerRegisters>();
        produce<Plan>(p, key_map, value_map, memory, split);
        if constexpr (Plan::kSplits > 1) {
            cluster_barrier();
            cluster_barrier();
        }
    } else {
        if constexpr (Plan::kMovesRegisters) raise_registers<Plan::kConsumerRegisters>();
        consume<Plan>(p, memory, split);
    }
}
