// The block lists of a paged call without the blocks that another rank holds: those whose first page is negative in
// this rank's page table. What cannot be looked up stays listed, and a bad row becomes one bad id, so that a bad row
// is bad on every rank.
#pragma once
#include "common/paged_params.cuh"

constexpr i32 kBadBlock = 0x7fffffff;       // past every length

DEVICE bool held_elsewhere(const PagedParams& p, const RowSpan& row, i32 block) {
    if (!block_in_length(p, row, block)) return false;
    const i64 logical = i64(block) * p.kv_block_size / p.page_size;
    return logical < row.page_count && row.pages[logical] < 0;
}

// One warp: how many blocks of row r stay listed; written to `to` where that is not null.
DEVICE int keep_row(const PagedParams& p, int b, int head, int r, i32* to) {
    const int lane = threadIdx.x % 32;
    const RowSpan row = resolve_row(p, b, head, r);
    if (row.bad) {
        if (to != nullptr && lane == 0) *to = kBadBlock;
        return 1;
    }
    int kept = 0;
    for (int first = 0; first < row.count; first += 32) {
        const bool listed = first + lane < row.count;
        const i32 block = listed ? row.blocks[first + lane] : 0;
        const bool keep = listed && !held_elsewhere(p, row, block);
        const u32 keepers = __ballot_sync(~0u, keep);
        if (keep && to != nullptr) to[kept + __popc(keepers & ((1u << lane) - 1))] = block;
        kept += __popc(keepers);
    }
    return kept;
}

DEVICE int inclusive_warp_sum(int x) {
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += before;
    }
    return x;
}

// All threads of a CTA: the blocks of a row that stay listed, written to `to`; returns how many. Ids are looked up once, all at once.
template <int Threads>
DEVICE int keep_row_by_cta(const PagedParams& p, const RowSpan& row, i32* to) {
    constexpr int kWarps = Threads / 32;
    __shared__ i32 kept[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int end = 0;
    for (int first = 0; first < row.count; first += Threads) {
        const int at = first + int(threadIdx.x);
        const i32 block = at < row.count ? row.blocks[at] : 0;
        const bool keep = at < row.count && !held_elsewhere(p, row, block);
        const u32 keepers = __ballot_sync(~0u, keep);
        if (lane == 0) kept[warp] = __popc(keepers);
        __syncthreads();
        int before = __popc(keepers & ((1u << lane) - 1)), all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            before += w < warp ? kept[w] : 0;
            all += kept[w];
        }
        if (keep) to[end + before] = block;
        end += all;
        __syncthreads();
    }
    return end;
}

// One CTA a (request, pattern head) of one row, as in decoding.
template <int Threads>
DEVICE void keep_held_blocks_of_one_row(const PagedParams& p, i32* indptr, i32* indices) {
    const RowSpan row = resolve_row(p, blockIdx.x / p.pattern_heads, blockIdx.x % p.pattern_heads, 0);
    const i32 base = i32(blockIdx.x) * p.max_blocks_per_row;
    i32 end = base + keep_row_by_cta<Threads>(p, row, indices + base);
    if (threadIdx.x != 0) return;
    if (row.bad) indices[end++] = kBadBlock;
    i32* ends = indptr + 2 * i64(blockIdx.x);
    ends[0] = base, ends[1] = end;
}

// One CTA a (request, pattern head): its rows are consecutive in the lists, so their ends are a prefix sum. Each has
// rows * max_blocks_per_row entries of `indices` to itself.
template <int Threads>
DEVICE void keep_held_blocks(const PagedParams& p, i32* indptr, i32* indices) {
    constexpr int kWarps = Threads / 32;
    __shared__ i32 starts[Threads], warp_sums[kWarps];
    const int b = blockIdx.x / p.pattern_heads, head = blockIdx.x % p.pattern_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i32* ends = indptr + i64(blockIdx.x) * (p.rows + 1);
    i32 base = i32(blockIdx.x) * p.rows * p.max_blocks_per_row;
    if (threadIdx.x == 0) *ends = base;
    for (int first = 0; first < p.rows; first += Threads) {
        const int rows = min(Threads, p.rows - first);
        for (int r = warp; r < rows; r += kWarps) {
            const int kept = keep_row(p, b, head, first + r, nullptr);
            if (lane == 0) starts[r] = kept;
        }
        __syncthreads();
        const int mine = int(threadIdx.x) < rows ? starts[threadIdx.x] : 0;
        int end = inclusive_warp_sum(mine);
        if (lane == 31) warp_sums[warp] = end;
        __syncthreads();
        if (warp == 0) {
            const int sum = inclusive_warp_sum(lane < kWarps ? warp_sums[lane] : 0);
            if (lane < kWarps) warp_sums[lane] = sum;
        }
        __syncthreads();
        end += base + (warp > 0 ? warp_sums[warp - 1] : 0);
        base += warp_sums[kWarps - 1];
        if (int(threadIdx.x) < rows) starts[threadIdx.x] = end - mine, ends[first + threadIdx.x + 1] = end;
        __syncthreads();
        for (int r = warp; r < rows; r += kWarps) keep_row(p, b, head, first + r, indices + starts[r]);
        __syncthreads();
    }
}
