// The scout: one warp that turns the bitmap rows of an item's queries into steps of 64 keys, a few ahead of
// the rest of the CTA. The list of a tile exists only as the few blocks that wait for their step, so scratch
// does not grow with the number of selected blocks.
#pragma once
#include "sm90/qsa_plan.cuh"

// `bytes` of 16 to shared memory; the others become zeros and are not read.
DEVICE void cp_async_part(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

template <typename Plan>
struct Scout {
    const QsaParams& p;
    const int lane = threadIdx.x % 32;
    u32 step = 0;
    // Of the item under way.
    int item, t0;
    QueryWindow window;                 // lane r: of query r
    bool opened;                        // its first step is out

    DEVICE Scout(const QsaParams& params) : p(params) {}

    static DEVICE QsaUnionMemory<Plan>& memory() { return qsa_memory<Plan>(); }
    // Waits until the next step's notes may be written.
    DEVICE StepNotes<Plan>& free_step() const {
        barrier_wait(memory().step_empty[slot_of<Plan::kSteps>(step)], trip_of<Plan::kSteps>(step) ^ 1);
        return memory().steps[slot_of<Plan::kSteps>(step)];
    }
    DEVICE void hand_over() {
        __syncwarp();
        if (lane == 0) barrier_arrive(memory().step_full[slot_of<Plan::kSteps>(step)]);
        ++step;
    }

    DEVICE void run() {
        const int items = ceil_div(p.num_tokens, Plan::kQueries) * p.num_kv_heads;
        while (take_item(items)) walk();
        StepNotes<Plan>& notes = free_step();
        if (lane == 0) notes.flags = kNoMoreWork;
        hand_over();
    }

    // The next item that is worth packing, long ones (late queries) first.
    DEVICE bool take_item(int items) {
        bool packed = false;
        do {
            int taken = 0;
            if (lane == 0) {
                taken = atomicAdd(&p.schedule->next_item, 1);
                packed = taken < items && p.item_mode[items - 1 - taken] == kUnionMode;
            }
            taken = __shfl_sync(~0u, taken, 0);
            if (taken >= items) return false;
            item = items - 1 - taken;
        } while (!__shfl_sync(~0u, packed, 0));
        return true;
    }

    DEVICE void walk() {
        t0 = item / p.num_kv_heads * Plan::kQueries;
        window = lane < Plan::kQueries && t0 + lane < p.num_tokens ? query_window(p, t0 + lane) : QueryWindow{0, -1, 0, 0};
        const bool any = window.end_block > 0;
        const int begin = __reduce_min_sync(~0u, any ? window.first_block : p.num_blocks) & ~15, end = __reduce_max_sync(~0u, any ? window.end_block : 0);
        opened = false;
        int pending = 0;
        if (begin < end) fetch(0, begin);
        for (int from = begin, buffer = 0; from < end; from += Plan::kScan, buffer ^= 1) {
            if (from + Plan::kScan < end) fetch(buffer ^ 1, from + Plan::kScan);
            else cp_async_commit();
            cp_async_wait<1>();
            __syncwarp();
            const int had = pending;
            pending += collect(buffer, from, pending);
            resolve(had, pending);
            int head = 0;
            for (; pending - head > Plan::kBlocks; head += Plan::kBlocks) emit(head, Plan::kBlocks, 0);
            pending -= head;
            keep_rest(head, pending);
        }
        emit(0, pending, kLastStep);
    }

    // Where a bitmap row's bytes for blocks from `from` on start, down to the 16-byte boundary before them.
    DEVICE const u8* aligned(int r, int from, u32& shift) const {
        const u8* at = p.sel_blocks + i64(t0 + r) * p.num_blocks + from;
        shift = u32(u64(at)) & 15;
        return at - shift;
    }

    // Starts copying what kScan blocks from `from` on need of every row. Always one group.
    DEVICE void fetch(int buffer, int from) {
        const u8* past = p.sel_blocks + i64(p.num_tokens) * p.num_blocks;
#pragma unroll 1
        for (int r = 0; r < Plan::kQueries; ++r) {
            if (!row_matters(r, from)) continue;
            u32 shift;
            const u8* row = aligned(r, from, shift);
#pragma unroll 1
            for (int i = lane; i < Plan::kScanRowBytes / 16; i += 32) {
                const u8* source = row + 16 * i;
                u8* to = &memory().bitmap[buffer][r][16 * i];
                if (source >= p.sel_blocks) {
                    const i64 left = past - source;
                    cp_async_part(smem_address(to), left > 0 ? source : p.sel_blocks, i32(max(i64(0), min(left, i64(16)))));
                } else {
                    for (int b = 0; b < 16; ++b) to[b] = source + b >= p.sel_blocks && source + b < past ? source[b] : 0;
                }
            }
        }
        cp_async_commit();
    }

    DEVICE bool row_matters(int r, int from) const {
        return __shfl_sync(~0u, window.end_block, r) > from && __shfl_sync(~0u, window.first_block, r) < from + Plan::kScan;
    }

    // Appends the blocks that some query selects, in order, with their owners; returns how many.
    DEVICE int collect(int buffer, int from, int pending) {
        u32 low[4] = {}, high[4] = {};      // a byte per block: queries 0..7 and 8..15
        const int block = from + 16 * lane;
#pragma unroll
        for (int r = 0; r < Plan::kQueries; ++r) {
            if (!row_matters(r, from)) continue;
            u32 shift;
            aligned(r, from, shift);
            const uint4* row = reinterpret_cast<const uint4*>(memory().bitmap[buffer][r]);
            uint4 bytes = row[lane];
            if (shift != 0) bytes = funnel16(bytes, row[lane + 1], shift);
            u32* owners = r < 8 ? low : high;
            owners[0] |= nonzero_bytes(bytes.x) >> 7 << r % 8;
            owners[1] |= nonzero_bytes(bytes.y) >> 7 << r % 8;
            owners[2] |= nonzero_bytes(bytes.z) >> 7 << r % 8;
            owners[3] |= nonzero_bytes(bytes.w) >> 7 << r % 8;
        }
        const int past = min(16, p.num_blocks - block);     // bytes beyond belong to another row
        u32 chosen = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) chosen |= u32(i < past && ((low[i / 4] | high[i / 4]) >> (i % 4 * 8) & 0xff) != 0) << i;
        int before = __popc(chosen);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += other;
        }
        int at = pending + before - __popc(chosen);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (chosen >> i & 1) {
                memory().pending_first[at] = block + i;       // the id: `resolve` makes it a token
                memory().pending_owners[at++] = (low[i / 4] >> (i % 4 * 8) & 0xff) | (high[i / 4] >> (i % 4 * 8) & 0xff) << 8;
            }
        __syncwarp();
        return __shfl_sync(~0u, before, 31);
    }

    DEVICE void resolve(int from, int to) {
#pragma unroll 2
        for (int i = from + lane; i < to; i += 32) {
            const int block = memory().pending_first[i], first = p.block_first[block], last = p.block_last[block];
            memory().pending_first[i] = first;
            memory().pending_owners[i] |= min(max(last - first + 1, 0), kQsaBlock) << 16;
        }
        __syncwarp();
    }

    DEVICE void keep_rest(int head, int count) {
        const int first = lane < count ? memory().pending_first[head + lane] : 0;
        const u32 owners = lane < count ? memory().pending_owners[head + lane] : 0;
        __syncwarp();
        if (lane < count) memory().pending_first[lane] = first, memory().pending_owners[lane] = owners;
        __syncwarp();
    }

    // One step of up to 16 pending blocks.
    DEVICE void emit(int head, int count, u32 flags) {
        const int first = lane < count ? memory().pending_first[head + lane] : 0;
        const u32 owners = lane < count ? memory().pending_owners[head + lane] : 0;
        StepNotes<Plan>& notes = free_step();
        u64 seen = 0, mine = 0;
        int token[2];
        u32 by[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {      // this lane's keys of the step: those of bits lane and lane + 32
            const int key = key_of_bit(32 * half + lane), from = key / kQsaBlock, in_block = key % kQsaBlock;
            const u32 all = __shfl_sync(~0u, owners, from);
            token[half] = __shfl_sync(~0u, first, from) + in_block;
            by[half] = in_block < all >> 16 ? all & 0xffff : 0;
        }
#pragma unroll
        for (int r = 0; r < Plan::kQueries; ++r) {
            const int lo = __shfl_sync(~0u, window.lo, r), hi = __shfl_sync(~0u, window.hi, r);
            const u32 lower = __ballot_sync(~0u, (by[0] >> r & 1) && token[0] >= lo && token[0] <= hi);
            const u32 upper = __ballot_sync(~0u, (by[1] >> r & 1) && token[1] >= lo && token[1] <= hi);
            const u64 row = u64(upper) << 32 | lower;
            seen |= row;
            if (lane == r) mine = row;
        }
        if (lane < Plan::kQueries) *reinterpret_cast<u64*>(notes.rows[lane]) = mine;
        if (lane < Plan::kBlocks) notes.first[lane] = first;
        if (lane == 0) notes.seen = seen, notes.item = item, notes.flags = flags | (opened ? 0 : kFirstStep);
        opened = true;
        hand_over();
    }
};
