// The producer side: the block list becomes tiles of boxes, boxes become bulk copies, queries are gathered.
#pragma once
#include "sm90/paged_plan.cuh"

// One box, looked at by one lane: where it lies and what the consumers must know of it.
struct Box {
    u32 token = kNoToken;       // first logical token; kNoToken: nothing to load
    int page = 0;
    bool full = false;          // every query of the block sees every key
    bool bad = false;           // an id or a page that does not exist
};

// The producer's view of one work item: its list, and the range of tokens its queries see.
template <typename Plan>
struct RowReader {
    const PagedParams& p;
    RowSpan row;
    int b;
    int sees_first, sees_last;  // last token that the first and the last query see
    int boxes;                  // of the list
    int boxes_per_block;

    DEVICE RowReader(const PagedParams& params, const WorkItem& w) : p(params), row(resolve_row(params, w.b, w.h, w.r)), b(w.b) {
        // Ids increase strictly, so a list longer than the length has a bad id in it; this also bounds `boxes` by 2^31.
        row.bad |= i64(row.count) * p.kv_block_size >= i64(row.length) + p.kv_block_size;
        boxes_per_block = p.kv_block_size / Plan::kBox;
        boxes = row.bad || w.count <= 0 ? 0 : row.count * boxes_per_block;
        sees_first = sees_last = row.length - 1;
        if (Plan::kCausal) {
            sees_first = row.length - p.seq_len_q + w.token(p, 0);
            sees_last = row.length - p.seq_len_q + w.token(p, w.count - 1);
        }
    }

    // No page is looked up for a token past the length: it is not selected. One that no query sees yet is.
    DEVICE Box read(int index) const {
        Box box;
        if (index >= boxes) return box;
        const int id = row.blocks[index / boxes_per_block];
        box.bad = !block_in_length(p, row, id);
        if (box.bad) return box;
        const u32 token = u32(id) * p.kv_block_size + index % boxes_per_block * Plan::kBox;
        if (token >= u32(row.length)) return box;
        box.page = lookup_page(p, row, token / p.page_size);
        box.bad = box.page < 0;
        if (box.bad || int(token) > sees_last) return box;
        box.token = token;
        box.full = token + (Plan::kBox - 1) <= u32(sees_first) && sees_first >= 0 && all_valid(token);
        return box;
    }

    // Leaves out boxes at the end of the list that nobody sees, but not what is bad in them.
    DEVICE void trim(int lane) {
        while (boxes > 0) {
            const int first = (boxes - 1) / 32 * 32;
            const Box box = read(first + lane);
            const u32 alive = __ballot_sync(~0u, box.token != kNoToken);
            row.bad |= __any_sync(~0u, box.bad);
            boxes = alive == 0 ? first : first + 32 - __clz(alive);
            if (alive != 0) return;
        }
    }

    DEVICE bool all_valid(u32 token) const {
        if constexpr (!Plan::kBits) return true;
        constexpr int kWords = Plan::kBox < 32 ? 1 : Plan::kBox / 32;
        constexpr u32 kMask = Plan::kBox < 32 ? (1u << (Plan::kBox % 32)) - 1 : ~0u;
        const u32* words = p.valid_bits + b * p.valid_bits_stride + token / 32;
        bool valid = true;
        for (int i = 0; i < kWords; ++i)
            if (token + 32 * i < u32(row.length)) valid &= (~words[i] & kMask << token % 32) == 0;
        return valid;
    }
};

// One warp that reads lists and page tables ahead of the copies: their latencies, one after the other, are
// longer than the rings can bridge.
template <typename Plan>
struct Planner {
    const PagedParams& p;
    PagedMemory<Plan>& memory;
    int lane, split;
    RingCursor<2> row_at{};
    u32 batches = 0;

    DEVICE void plan(const WorkItem& w) {
        RowReader<Plan> reader(p, w);
        if constexpr (Plan::kCausal) reader.trim(lane);
        const int tiles = ceil_div(reader.boxes, Plan::kBoxes);
        const int begin = int(i64(tiles) * split / Plan::kSplits), end = int(i64(tiles) * (split + 1) / Plan::kSplits);
        announce({w, end - begin, reader.row.length, reader.row.bad, reader.sees_first, reader.sees_last});
        for (int tile = begin; tile < end; tile += 32 / Plan::kBoxes)
            hand_over(w.h, min(end - tile, 32 / Plan::kBoxes), reader.read(tile * Plan::kBoxes + lane));
        row_at.advance();
    }
    DEVICE void finish() {
        announce({WorkItem(), -1});
        hand_over(0, -1, Box());
    }

private:
    DEVICE void announce(const RowNotes& notes) {
        barrier_wait(memory.row_empty[row_at.slot()], row_at.phase() ^ 1);
        if (lane == 0) {
            memory.rows[row_at.slot()] = notes;
            barrier_arrive(memory.row_full[row_at.slot()]);
        }
        __syncwarp();                               // other lanes may mark the row bad, from here on
    }

    DEVICE void hand_over(int head, int tiles, const Box& box) {
        BoxBatch& batch = memory.batch;
        const u32 alive = __ballot_sync(~0u, box.token != kNoToken);
        const u32 partial = __ballot_sync(~0u, !box.full);
        if (box.bad) memory.rows[row_at.slot()].bad = 1;
        barrier_wait(memory.batch_empty, ~batches & 1);
        ++batches;
        batch.token[lane] = box.token;
        batch.page[lane] = box.page;
        if (lane == 0) batch.tiles = tiles, batch.head = head, batch.alive = alive, batch.partial = partial;
        __syncwarp();
        if (lane == 0) barrier_arrive(memory.batch_full);
    }
};

// One warp: every tile, in the order in which the consumers take them.
template <typename Plan>
struct KeyValueLoader {
    const PagedParams& p;
    const TensorMap& key_map;
    const TensorMap& value_map;
    PagedMemory<Plan>& memory;
    int lane;
    RingCursor<Plan::kStages> at{};

    DEVICE void run() {
        for (u32 phase = 0;; phase ^= 1) {
            barrier_wait(memory.batch_full, phase);
            const BoxBatch& batch = memory.batch;
            const int tiles = batch.tiles, head = batch.head;
            const u32 alive = batch.alive, partial = batch.partial, token = batch.token[lane];
            const int page = batch.page[lane];
            __syncwarp();
            if (lane == 0) barrier_arrive(memory.batch_empty);
            if (tiles < 0) return;
            for (int i = 0; i < tiles; ++i) {
                const u32 members = kTileMask << (i * Plan::kBoxes);
                load_tile(head, page, token, members, alive & members, (partial & members) != 0);
            }
        }
    }

private:
    static constexpr u32 kTileMask = (1u << Plan::kBoxes) - 1;

    DEVICE void load_tile(int head, int page, u32 token, u32 members, u32 alive, bool partial) {
        const int bytes = __popc(alive) * Plan::kBox * Plan::kHeadDim * 2;
        const int place = lane % Plan::kBoxes, slot = token % p.page_size;
        const bool loads = alive >> lane & 1;

        barrier_wait(memory.keys_empty[at.slot()], at.phase() ^ 1);
        TileNotes<Plan::kBoxes>& notes = memory.notes[at.at];
        if (members >> lane & 1) notes.token[place] = token;
        if (lane == 0) notes.partial = partial;
        __syncwarp();
        copy(memory.keys[at.slot()], key_map, memory.keys_full[at.slot()], slot, head, page, place, loads, bytes);
        barrier_wait(memory.values_empty[at.slot()], at.phase() ^ 1);
        copy(memory.values[at.slot()], value_map, memory.values_full[at.slot()], slot, head, page, place, loads, bytes);
        at.advance();
    }

    DEVICE void copy(u8* tile, const TensorMap& map, u64& full, int slot, int head, int page, int place, bool loads, int bytes) {
        if (lane == 0) barrier_arrive_expect(full, bytes);
        __syncwarp();
        if (loads) {
            const u32 to = smem_address(tile) + place * Plan::kBox * 128;
#pragma unroll
            for (int half = 0; half < Plan::kHalves; ++half) load_box(to + half * Plan::kColumnBytes, map, full, 64 * half, slot, head, page);
        }
        __syncwarp();
    }
};

// Queries of one item into shared memory, k-major under the 128-byte swizzle; rows past the live ones are zeros.
template <typename Plan>
DEVICE void gather_queries(const PagedParams& p, PagedMemory<Plan>& memory, const WorkItem& w, int thread) {
    constexpr int kPieces = Plan::kHeadDim / 8;         // 16 bytes each
    const auto* q = static_cast<const typename Plan::Element*>(p.q) + w.b * p.q_stride_b;
    for (int i = thread; i < Plan::kRows * kPieces; i += Plan::kQueryThreads) {
        const int row = i / kPieces, piece = i % kPieces;
        const bool live = row < w.count;
        const u32 to = smem_address(memory.queries[row / 64]) + piece / 8 * Plan::kQueryColumnBytes + row % 64 * 128 + (piece % 8 ^ row % 8) * 16;
        cp_async16(to, live ? q + w.token(p, row) * p.q_stride_t + w.head(p, row) * p.q_stride_h + piece * 8 : q, live);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    barrier_arrive(memory.queries_full);
}
