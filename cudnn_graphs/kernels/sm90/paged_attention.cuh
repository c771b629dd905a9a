// Paged block-sparse attention on Hopper: producer warps and one to three consumer warpgroups, rings of tiles between them.
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
    using Cursor = TileCursor<Plan>;

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

    // First of a thread's two rows in the item.
    DEVICE static int row_of(int thread_index) { return Plan::in_chain(thread_index) / 32 * 16 + thread_index % 32 / 4; }

    // Waits for the next item. False: there are no more.
    DEVICE bool next_row() {
        await_row(done);
        return tiles() >= 0;
    }
    // Starts to fetch the queries of an item, if there is one, where consumers do that; those of the last are no longer read.
    DEVICE void fetch_queries(u32 item) {
        await_row(item);
        const RowNotes& notes = memory.rows[item % Plan::kRowSlots];
        if (notes.tiles >= 0) gather_queries<Plan>(p, memory, notes.item, thread_index_again() % 128);
    }

    // Everything of the item up to, not including, the store.
    DEVICE void attend() {
        const int tiles = this->tiles();
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

    DEVICE const RowNotes& row_notes() const { return memory.rows[done % Plan::kRowSlots]; }
    DEVICE void finish_row() {
        release(memory.row_empty[done % Plan::kRowSlots]);
        ++done;
    }

private:
    DEVICE void await_row(u32 item) { barrier_wait(memory.row_full[item % Plan::kRowSlots], item / Plan::kRowSlots % 2); }
    // By a vote or a shuffle here and below: branches that the compiler cannot see a warp agree on cost it the uniform
    // registers in which operands of products are named.
    DEVICE int tiles() const { return __shfl_sync(~0u, row_notes().tiles, 0); }

    DEVICE void clear_output() {
#pragma unroll
        for (int c = 0; c < Plan::kChunks; ++c)
#pragma unroll
            for (int j = 0; j < Plan::kChunk / 8; ++j) o[c][j][0] = o[c][j][1] = o[c][j][2] = o[c][j][3] = 0.f;
    }

    DEVICE void take_queries(int tiles) {
        if constexpr (Plan::kOwnQueries) {
            cp_async_wait<0>();
            fence_async_proxy();
            named_barrier(kWarpgroupBarrier + thread_index_again() / 128, 128);
        } else {
            barrier_wait(memory.queries_full, done % 2);
        }
        if constexpr (Plan::kQueriesInRegisters) {
            const int index = thread_index_again(), lane = index % 32, row = index % 128 / 32 * 16 + lane % 16;
            const u32 at = smem_address(memory.queries[Plan::in_chain(index) / 128]) + row * 128;
#pragma unroll
            for (int k = 0; k < Plan::kHeadDim / 16; ++k)
                ldmatrix_x4(queries[k], at + k / 4 * Plan::kQueryColumnBytes + ((2 * k + lane / 16) % 8 ^ row % 8) * 16);
        }
        if (Plan::kQueriesInRegisters || tiles == 0) release_queries();
    }

    // Each warp speaks for itself: its own reads are over.
    DEVICE void release(u64& barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
    }

    DEVICE void release_queries() {
        if constexpr (!Plan::kOwnQueries) release(memory.queries_empty);
    }

    // Q.K^T of the next tile, once its keys are there.
    DEVICE void issue_scores() {
        barrier_wait(memory.full[tile.key_slot()], tile.key_phase());
        const u64 k = k_major_operand(smem_address(memory.ring[0])) + tile.key_slot() * operand_bytes(Plan::kTileBytes);
        u64 q = k_major_operand(smem_address(memory.queries[Plan::kConsumers == 1 ? 0 : threadIdx.x / 128]));
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

    // Scores are there, keys no longer needed, nor are queries after the row's last tile. True: values have to be cleaned.
    template <int kPending>
    DEVICE bool finish_scores(bool last) {
        const Partial partial = memory.notes[tile.at].partial;
        const bool masked = __any_sync(~0u, partial != Partial::kNo), clean = __any_sync(~0u, partial == Partial::kMaskAndClean);
        wgmma_wait<kPending>();
        keep_order(s);
        release(memory.empty[tile.key_slot()]);
        if (!Plan::kQueriesInRegisters && last) release_queries();
        if (masked) mask();
        return clean;
    }

    DEVICE void await_values(Cursor of) { barrier_wait(memory.full[of.value_slot()], of.value_phase()); }

    DEVICE void issue_values(Cursor of) {
        const u64 v = n_major_operand(smem_address(memory.ring[0]), Plan::kColumnBytes) + of.value_slot() * operand_bytes(Plan::kTileBytes);
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
        release(memory.empty[of.value_slot()]);
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
        const bool clean = finish_scores<0>(last);
        softmax.step(s, p.scale_log2);              // nothing to rescale yet
        round_probabilities();
        if (clean) clean_values();
        tile.advance();
    }

    // Scores of the next tile, values of the one before.
    DEVICE void next_tile(bool last) {
        const Cursor before = tile.before();
        bool clean, moved;
        issue_scores();
        if constexpr (Plan::kKeyStages == 0) {      // V came after its K, and may not be there yet: first what does not need it
            clean = finish_scores<0>(last);
            moved = softmax.follow(s, p.scale_log2);
            await_values(before);
            issue_values(before);
            softmax.template exponentiate<true>(s, p.scale_log2);
        } else {
            await_values(before);
            issue_values(before);
            clean = finish_scores<1>(last);
            moved = softmax.step(s, p.scale_log2);
        }
        finish_values(before);
        if (moved) rescale_output();
        round_probabilities();
        if (clean) clean_values();
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
        u8* values = memory.ring[tile.value_slot()];
        const bool mixed = clear_dead_values<Plan>(values, memory.notes[tile.at], sight, thread, kWarpgroupBarrier + index / 128);
        if (!Plan::kCausal || !__any_sync(~0u, mixed)) return;
        add_seen_values<Plan>(o, probabilities, values, lane);
        clear_nonfinite_values<Plan>(values, thread, kChainBarrier + Plan::chain_of(index));
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) probabilities[k][0] = probabilities[k][1] = probabilities[k][2] = probabilities[k][3] = 0;
    }
};

template <typename Plan>
DEVICE void init_barriers(PagedMemory<Plan>& memory) {
    constexpr int kConsumerWarps = 4 * Plan::kConsumers;
    for (int i = 0; i < Plan::kSlots; ++i) {
        barrier_init(memory.full[i], 1);
        barrier_init(memory.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < Plan::kRowSlots; ++i) {
        barrier_init(memory.row_full[i], 1);
        barrier_init(memory.row_empty[i], kConsumerWarps);
    }
    barrier_init(memory.batch_full, 1);
    barrier_init(memory.batch_empty, 1);
    barrier_init(memory.queries_full, Plan::kQueryThreads);
    barrier_init(memory.queries_empty, kConsumerWarps);
}

// Every chain's first item is dealt. The others are drawn from a counter, where there is one: SMs differ in speed, and chains that
// stay together in the order of items find each other's keys in L2 (P4: 28 GB read from memory, 68 when all items were dealt). A
// cluster takes one item at a time.
template <typename Plan>
struct Schedule {
    u32* drawn;                                     // zero at first; null: all items are dealt, round over the chains
    int all, chains, next;

    DEVICE Schedule(const PagedParams& p, u32* counter, int chain) : drawn(counter) {
        all = p.batch * p.num_kv_heads * p.rows * WorkItem::items_per_row<Plan::kRows>(p);
        const int blocks = gridDim.x / Plan::kSplits;
        chains = Plan::kChains * blocks;
        next = chain * blocks + blockIdx.x / Plan::kSplits;
    }

    template <typename Receiver>
    DEVICE void plan(const PagedParams& p, PagedMemory<Plan>& memory, Receiver& receiver, int lane, int split) {
        Planner<Plan, Receiver> planner{p, memory, receiver, lane, split};
        for (; next < all; draw(lane)) {
            planner.plan(WorkItem::of<Plan::kRows>(p, next));
            planner.await_slot();                   // no item is drawn before its turn
        }
        planner.finish();
    }

private:
    DEVICE void draw(int lane) {
        int turn = next;
        if (drawn != nullptr) {
            if (lane == 0) turn = i32(atomicAdd(drawn, 1));
            turn = __shfl_sync(~0u, turn, 0);
        }
        next = turn + chains;
    }
};

// One chain: its copies, its plan and its queries have a warp or two each.
template <typename Plan>
DEVICE void produce_one(const PagedParams& p, const TensorMap& key_map, const TensorMap& value_map, u32* drawn, PagedMemory<Plan>& memory, int thread,
                        int split) {
    if (thread < 32) {
        KeyValueLoader<Plan> loader{p, key_map, value_map, memory, thread};
        load_what_is_sent(loader);
    } else if (thread < 64) {
        BatchSender<Plan> sender{memory, thread - 32};
        Schedule<Plan>(p, drawn, 0).plan(p, memory, sender, thread - 32, split);
    } else {
        for (u32 item = 0;; ++item) {
            barrier_wait(memory.row_full[item % Plan::kRowSlots], item / Plan::kRowSlots % 2);
            const RowNotes& notes = memory.rows[item % Plan::kRowSlots];        // not given to another item before the queries are there
            if (notes.tiles < 0) break;
            barrier_wait(memory.queries_empty, ~item & 1);
            gather_queries<Plan>(p, memory, notes.item, thread - 64);
            cp_async_wait<0>();
            fence_async_proxy();
            barrier_arrive(memory.queries_full);
        }
    }
}

// Several: a warp plans and copies for each.
template <typename Plan>
DEVICE void produce_several(const PagedParams& p, const TensorMap& key_map, const TensorMap& value_map, u32* drawn, PagedMemory<Plan> (&memory)[Plan::kChains],
                            int thread) {
    const int chain = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    if (chain >= Plan::kChains) return;
    DelayedLoader<Plan> loader{{p, key_map, value_map, memory[chain], lane}};
    Schedule<Plan>(p, drawn, chain).plan(p, memory[chain], loader, lane, 0);
}

template <typename Plan>
DEVICE void consume(const PagedParams& p, PagedMemory<Plan>& memory, int split) {
    Consumer<Plan> consumer(p, memory);
    if constexpr (Plan::kOwnQueries) consumer.fetch_queries(0);
    while (consumer.next_row()) {
        consumer.attend();
        const WorkItem w = consumer.row_notes().item;
        const bool bad = consumer.row_notes().bad;
        const int index = thread_index_again(), row = consumer.row_of(index), lane = index % 32;
        if constexpr (Plan::kOwnQueries) {              // they come while this item is stored
            named_barrier(kWarpgroupBarrier + index / 128, 128);
            consumer.fetch_queries(consumer.done + 1);
        }
        if constexpr (Plan::kSplits == 1) {
            store_rows<Plan>(p, w, consumer.o, consumer.softmax, bad, row, lane);
        } else {
            auto& partial = reinterpret_cast<PartialResult<Plan>&>(memory.ring);
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
DEVICE void paged_attention(const PagedParams& p, const TensorMap& key_map, const TensorMap& value_map, u32* drawn) {
    extern __shared__ __align__(1024) u8 raw_memory[];
    auto& memory = *reinterpret_cast<PagedMemory<Plan>(*)[Plan::kChains]>(raw_memory);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(key_map);
        prefetch_tensor_map(value_map);
        for (auto& chain : memory) init_barriers(chain);
        barrier_init_fence();
    }
    __syncthreads();
    const int split = Plan::kSplits == 1 ? 0 : cluster_rank();
    if (threadIdx.x >= Plan::kConsumerThreads) {
        if constexpr (Plan::kMovesRegisters) lower_registers<Plan::kProducerRegisters>();
        const int thread = threadIdx.x - Plan::kConsumerThreads;
        if constexpr (Plan::kChains == 1) produce_one<Plan>(p, key_map, value_map, drawn, memory[0], thread, split);
        else produce_several<Plan>(p, key_map, value_map, drawn, memory, thread);
        if constexpr (Plan::kSplits > 1) {
            cluster_barrier();
            cluster_barrier();
        }
    } else {
        if constexpr (Plan::kMovesRegisters) raise_registers<Plan::kConsumerRegisters>();
        consume<Plan>(p, memory[Plan::chain_of(threadIdx.x)], split);
    }
}
