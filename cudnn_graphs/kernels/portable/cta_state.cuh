// What all threads of a CTA know of its work. It lies in shared memory because the accumulators leave no
// registers for it.
#pragma once
#include "common/paged_params.cuh"
#include "common/ptx.cuh"
#include "portable/paged_config.cuh"
#include "portable/query_tile.cuh"

struct CtaState {
    QueryTile tile;
    RowSpan row;
    int lowest_limit, highest_limit;    // last keys that the first and the last query row may see
    int first_tile, end_tile;           // key tiles of this CTA

    // All key tiles of the row.
    template <typename C>
    static DEVICE CtaState of(const PagedParams& p, const QueryTile& tile);

    // Those of the tile's split.
    DEVICE void keep_split(const PagedParams& p) {
        const int tiles = end_tile, share = ceil_div(tiles, p.num_splits);
        first_tile = min(tiles, tile.split * share);
        end_tile = min(tiles, first_tile + share);
    }
};

// Key tiles that `blocks` listed blocks fill.
template <typename C>
DEVICE int key_tiles(const PagedParams& p, int blocks) {
    return p.kv_block_size < C::kKeys ? ceil_div(blocks, C::kKeys / p.kv_block_size) : blocks * (p.kv_block_size / C::kKeys);
}

// The part of it that the gather needs in every tile, read in one piece: fetched field by field between
// branches, each would wait for shared memory.
struct alignas(16) GatherState {
    const i32* blocks;
    const i32* pages;
    int count, page_count, length, highest_limit;
    int end_tile, b, h, unused;
};

template <typename C>
DEVICE CtaState& state() {
    static_assert(sizeof(CtaState) <= C::kGather - C::kState, "");
    return *reinterpret_cast<CtaState*>(shared_memory + C::kState);
}

// Reduces a row to its partial last block, the one that ends past the live length; to nothing where there is none.
DEVICE void keep_partial_tail(const PagedParams& p, RowSpan& row) {
    if (row.count == 0) return;
    row.blocks += row.count - 1;
    const int block = row.blocks[0];
    const bool whole = block_in_length(p, row, block) && (i64(block) + 1) * p.kv_block_size <= row.length;
    row.count = whole ? 0 : 1;          // a block that does not exist stays, and makes the row bad
}

template <typename C>
DEVICE CtaState CtaState::of(const PagedParams& p, const QueryTile& tile) {
    CtaState cta;
    cta.tile = tile;
    cta.row = resolve_row(p, tile.b, tile.h, tile.r);
    if constexpr (C::kTailOnly) keep_partial_tail(p, cta.row);
    cta.lowest_limit = tile.template limit<C>(p, cta.row.length, 0);
    cta.highest_limit = tile.template limit<C>(p, cta.row.length, tile.count - 1);
    cta.first_tile = 0;
    cta.end_tile = key_tiles<C>(p, cta.row.count);
    return cta;
}

// The last key that row m of the tile sees. Causal limits are tabulated: each is a division by the group size.
template <typename C>
DEVICE int* causal_limits() { return reinterpret_cast<int*>(shared_memory + C::kLimits); }

template <typename C>
DEVICE void set_row_limits(const PagedParams& p, const CtaState& cta) {
    for (int m = threadIdx.x; m < C::kRows; m += C::kThreads) causal_limits<C>()[m] = cta.tile.template limit<C>(p, cta.row.length, m);
}

template <typename C>
DEVICE int row_limit(int m) { return C::kCausal ? causal_limits<C>()[m] : state<C>().highest_limit; }

template <typename C>
DEVICE void set_gather_state(const CtaState& cta) {
    const int pages = int(min(cta.row.page_count, i64(0x7fffffff)));
    *reinterpret_cast<GatherState*>(shared_memory + C::kGather) = {
        cta.row.blocks, cta.row.pages, cta.row.count, pages, cta.row.length, cta.highest_limit, cta.end_tile, cta.tile.b, cta.tile.h, 0};
}

template <typename C>
DEVICE GatherState gather_state() {
    static_assert(sizeof(GatherState) == C::kGatherBytes && C::kGather % 16 == 0, "");
    GatherState state;
#pragma unroll
    for (int i = 0; i < C::kGatherBytes / 16; ++i)
        reinterpret_cast<uint4*>(&state)[i] = load_shared16(smem_address(shared_memory + C::kGather) + 16 * i);
    return state;
}
