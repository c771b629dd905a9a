// The partial last block of the rows that have one, as partial results, beside a folded cuDNN graph.
//
// Few rows have one. A CTA for each tile would go down the chain from length to list only to find that out: so the fold
// notes it, and few CTAs read the notes of 32 tiles at once.
#pragma once
#include "portable/fold_rows.cuh"
#include "portable/paged_attention.cuh"

// Where a CTA is among its tiles: in shared memory, because attending leaves no register to keep it in.
struct TailWalk {
    int first;                  // tile of bit 0; those of the other bits are gridDim.x apart
    u32 left;                   // tiles still to attend to
};

template <typename C>
DEVICE void paged_tail(const FoldParams& f) {
    __shared__ volatile TailWalk walk;
    const PagedParams& p = f.paged;
    if (threadIdx.x == 0) walk.first = int(blockIdx.x) - 32 * int(gridDim.x), walk.left = 0;
    for (;;) {
        __syncthreads();                // the walk is there, and nobody reads the last tile's shared memory any more
        const int per_row = QueryTile::tiles_of_row<C>(p), tiles = p.batch * p.num_kv_heads * p.rows * per_row;
        int first = walk.first;
        u32 left = walk.left;
        while (left == 0 && (first += 32 * gridDim.x) < tiles) {
            const int mine = first + threadIdx.x % 32 * gridDim.x;
            left = __ballot_sync(~0u, mine < tiles && has_tail(f.row_notes[mine / per_row]));
        }
        if (left == 0) return;
        __syncthreads();                // everyone has read the walk
        if (threadIdx.x == 0) walk.first = first, walk.left = left & (left - 1);
        attend_tile<C>(p, first + (__ffs(left) - 1) * gridDim.x, 0);
    }
}
