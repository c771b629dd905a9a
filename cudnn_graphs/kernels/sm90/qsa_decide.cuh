// Which tiles are worth packing: counts, for each, the blocks of the union and the (query, block) pairs.
#pragma once
#include "sm90/qsa_plan.cuh"

constexpr int kDecideThreads = 128;

// Only their ratio counts. A block of the union costs its sixteenth of a step, whoever attends it (2.3 us a step on an SM of
// an H200); a (query, block) pair in the gather kernel, reading 4 KB from L2 (73 ns). So unions up to about 5 times as wide
// as one query's own selection are packed. Random selections at T = 32768: 40% of the tiles, 7.7 ms; all packed 8.5, none 9.0.
constexpr i64 kUnionBlockCost = 210, kGatherPairCost = 110;

// One CTA a tile. The first also resets the schedule, which only later kernels use.
template <typename Plan>
DEVICE void qsa_decide(const QsaParams& p) {
    __shared__ QueryWindow windows[Plan::kQueries];
    __shared__ int blocks, pairs;
    const int tile = blockIdx.x, t0 = tile * Plan::kQueries;
    if (threadIdx.x < Plan::kQueries)
        windows[threadIdx.x] = t0 + i32(threadIdx.x) < p.num_tokens ? query_window(p, t0 + threadIdx.x) : QueryWindow{0, -1, 0, 0};
    if (threadIdx.x == 0) blocks = pairs = 0;
    if (threadIdx.x == 0 && tile == 0) p.schedule->next_item = p.schedule->gather_count = 0;
    __syncthreads();
    int begin = p.num_blocks, end = 0;
    for (int r = 0; r < Plan::kQueries; ++r)
        if (windows[r].end_block > 0) begin = min(begin, windows[r].first_block), end = max(end, windows[r].end_block);
    int my_blocks = 0, my_pairs = 0;
    for (int from = (begin & ~15) + 16 * threadIdx.x; from < end; from += 16 * kDecideThreads) {
        u32 any = 0;
#pragma unroll 5
        for (int r = 0; r < Plan::kQueries; ++r) {
            const int first = windows[r].first_block, past = windows[r].end_block;
            const u32 bits = from < past && from + 16 > first ? selected16(bitmap16(p, i64(t0 + r) * p.num_blocks + from), from, first, past) : 0;
            any |= bits;
            my_pairs += __popc(bits);
        }
        my_blocks += __popc(any);
    }
    my_blocks = __reduce_add_sync(~0u, my_blocks), my_pairs = __reduce_add_sync(~0u, my_pairs);
    if (threadIdx.x % 32 == 0) atomicAdd(&blocks, my_blocks), atomicAdd(&pairs, my_pairs);
    __syncthreads();
    if (threadIdx.x >= p.num_kv_heads) return;
    // Few tiles leave SMs idle; single queries fill them. A last tile of few queries counts as if it were full: alone
    // in the gather kernel it takes longer than among the others here (60 us of 700 at T = 8192).
    const i64 items = i64(gridDim.x) * p.num_kv_heads, waves = max(i64(p.sm_count), items), live = min(Plan::kQueries, p.num_tokens - t0);
    const bool pack = blocks * kUnionBlockCost * waves * live <= pairs * kGatherPairCost * items * Plan::kQueries;
    p.item_mode[tile * p.num_kv_heads + threadIdx.x] = pack ? kUnionMode : kGatherMode;
}
