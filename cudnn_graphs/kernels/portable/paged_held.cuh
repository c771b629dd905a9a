// Decoding over the blocks that this rank holds of a split cache: the CTA of a row takes the others off its list itself, into
// shared memory. As a launch before this one (held_blocks.cuh) that took 1.6 us more of P6's step.
//
// Rows are uneven then, P6's 22 to 42 of 64 blocks, and the longest would end last by far: all CTAs of one wave read at one rate. So long
// rows read faster: after its first tiles a row requests two ahead instead of one, and the longer it is, the sooner.
#pragma once
#include "portable/held_blocks.cuh"
#include "portable/paged_attention.cuh"

// The tile of the row from which on two are requested ahead. In shared memory because attending leaves no register for it.
DEVICE int& faster_from() {
    __shared__ int tile;
    return tile;
}

// For three stages. Before a tile is used, at most one group of copies younger than its own is pending: an empty one follows each tile
// that is requested alone, two groups come with the first pair, and one with every tile after that.
template <typename C>
class PacedPipeline {
public:
    explicit DEVICE PacedPipeline(const PagedParams& p) : keys_(p) {
        static_assert(C::kStages == 3, "");
        load(0);
        cp_async_commit();
    }

    DEVICE void advance(int tile, int) {
        const int faster = faster_from();
        if (tile <= faster) load(tile + 1);
        if (tile >= faster) load(tile + 2);
        else cp_async_commit();
    }

private:
    KeyGather<C> keys_;
    int stage_ = 0;

    DEVICE void load(int tile) {
        keys_.load(tile, stage_);
        stage_ = stage_ == C::kStages - 1 ? 0 : stage_ + 1;
    }
};

// pace: about the time of all rows, in tiles requested one ahead; a row of n is faster from tile 2 * pace - n on. Not kPaced: all read
// at one rate.
// Dynamic shared memory: that of the configuration, then p.max_blocks_per_row ids.
template <typename C, bool kPaced>
DEVICE void paged_held(const PagedParams& p, i32 pace) {
    CtaState cta = CtaState::of<C>(p, QueryTile::of<C>(p, blockIdx.x, 0));
    i32* held = reinterpret_cast<i32*>(shared_memory + C::kSmemBytes);
    cta.row.count = keep_row_by_cta<C::kThreads>(p, cta.row, held);
    cta.row.blocks = held;
    cta.end_tile = key_tiles<C>(p, cta.row.count);
    if constexpr (!kPaced) {
        attend_tile<C>(p, cta);
    } else {
        if (threadIdx.x == 0) faster_from() = max(0, 2 * pace - cta.end_tile);
        attend_tile<C, PacedPipeline<C>>(p, cta);
    }
}
