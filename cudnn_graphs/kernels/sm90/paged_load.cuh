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
template <typename Plan, typename Receiver>
struct Planner {
    const PagedParams& p;
    PagedMemory<Plan>& memory;
    Receiver& receiver;
    int lane, split;
    RingCursor<Plan::kRowSlots> row_at{};

    DEVICE void plan(const WorkItem& w) {
        RowReader<Plan> reader(p, w);
        if constexpr (Plan::kCausal) reader.trim(lane);
        const int tiles = ceil_div(reader.boxes, Plan::kBoxes);
        const int begin = int(i64(tiles) * split / Plan::kSplits), end = int(i64(tiles) * (split + 1) / Plan::kSplits);
        announce({w, end - begin, reader.row.length, reader.row.bad, reader.sees_first, reader.sees_last});
        for (int tile = begin; tile < end; tile += kTiles)
            hand_over(w.h, min(end - tile, kTiles), tile + kTiles >= end, reader.read(tile * Plan::kBoxes + lane));
        if (begin >= end) receiver.take({0, 0, true});       // what is held back must not wait for this item's tiles: it has none
        row_at.advance();
    }
    // Until there is room for another item.
    DEVICE void await_slot() { barrier_wait(memory.row_empty[row_at.slot()], row_at.phase() ^ 1); }
    DEVICE void finish() {
        announce({WorkItem(), -1});
        receiver.take({-1});
    }

private:
    static constexpr int kTiles = 32 / Plan::kBoxes;

    DEVICE void announce(const RowNotes& notes) {
        await_slot();
        if (lane == 0) {
            memory.rows[row_at.slot()] = notes;
            barrier_arrive(memory.row_full[row_at.slot()]);
        }
        __syncwarp();                               // other lanes may mark the row bad, from here on
    }

    DEVICE void hand_over(int head, int tiles, bool ends, const Box& box) {
        const u32 masked = __ballot_sync(~0u, !box.full);
        const u32 cleaned = __ballot_sync(~0u, !box.full && box.token != kNoToken);
        if (box.bad) memory.rows[row_at.slot()].bad = 1;
        receiver.take({tiles, head, ends, masked, cleaned, box.token, box.page});
    }
};

// From the planning warp to the copying one.
template <typename Plan>
struct BatchSender {
    PagedMemory<Plan>& memory;
    int lane;
    u32 batches = 0;

    DEVICE void take(const BoxBatch& batch) {
        BatchMailbox& mailbox = memory.batch;
        barrier_wait(memory.batch_empty, ~batches & 1);
        ++batches;
        mailbox.token[lane] = batch.token;
        mailbox.page[lane] = batch.page;
        if (lane == 0) mailbox.tiles = batch.tiles, mailbox.head = batch.head, mailbox.ends = batch.ends;
        if (lane == 0) mailbox.masked = batch.masked, mailbox.cleaned = batch.cleaned;
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
    TileCursor<Plan> at{};                          // whose keys are next
    int slot_before = 0, page_before = 0;           // of the batch before, whose last tile's values are not copied yet
    bool owes_values = false;

    // K of a tile goes ahead of V of the one before, for which it may have to wait longer. Coordinates outside the tensor,
    // where there is nothing to load, make zeros.
    DEVICE void load(const BoxBatch& batch) {
        const int slot = batch.token % p.page_size, page = batch.token == kNoToken ? -1 : batch.page;
        for (int i = 0; i < batch.tiles; ++i) {
            const u32 members = kTileMask << (i * Plan::kBoxes);
            load_keys(batch, members, slot, page);
            if (i > 0) load_values(members >> Plan::kBoxes, slot, batch.head, page);
            else if (owes_values) load_values(kTileMask << (32 - Plan::kBoxes), slot_before, batch.head, page_before);
            at.advance();
        }
        if (batch.tiles <= 0) return;
        if (batch.ends) load_values(kTileMask << ((batch.tiles - 1) * Plan::kBoxes), slot, batch.head, page);
        slot_before = slot, page_before = page, owes_values = !batch.ends;
    }

private:
    static constexpr u32 kTileMask = (1u << Plan::kBoxes) - 1;

    DEVICE void load_keys(const BoxBatch& batch, u32 members, int slot, int page) {
        barrier_wait(memory.empty[at.key_slot()], at.key_phase() ^ 1);
        TileNotes<Plan::kBoxes>& notes = memory.notes[at.at];
        if (members >> lane & 1) notes.token[lane % Plan::kBoxes] = batch.token;
        if (lane == 0) notes.partial = (batch.cleaned & members) != 0 ? Partial::kMaskAndClean : (batch.masked & members) != 0 ? Partial::kMask : Partial::kNo;
        __syncwarp();
        copy(at.key_slot(), key_map, members, slot, batch.head, page);
    }
    // Of the tile before the one at `at`.
    DEVICE void load_values(u32 members, int slot, int head, int page) {
        const TileCursor<Plan> before = at.before();
        barrier_wait(memory.empty[before.value_slot()], before.value_phase() ^ 1);
        copy(before.value_slot(), value_map, members, slot, head, page);
    }

    DEVICE void copy(int to_slot, const TensorMap& map, u32 members, int slot, int head, int page) {
        u64& full = memory.full[to_slot];
        if (lane == 0) barrier_arrive_expect(full, Plan::kTileBytes);
        __syncwarp();
        if (members >> lane & 1) {
            const u32 to = smem_address(memory.ring[to_slot]) + lane % Plan::kBoxes * Plan::kBox * 128;
#pragma unroll
            for (int half = 0; half < Plan::kHalves; ++half) load_box(to + half * Plan::kColumnBytes, map, full, 64 * half, slot, head, page);
        }
        __syncwarp();
    }
};

// A warp that only copies, as a BatchSender tells it.
template <typename Plan>
DEVICE void load_what_is_sent(KeyValueLoader<Plan>& loader) {
    BatchMailbox& mailbox = loader.memory.batch;
    for (u32 phase = 0;; phase ^= 1) {
        barrier_wait(loader.memory.batch_full, phase);
        const BoxBatch batch = {mailbox.tiles, mailbox.head, mailbox.ends != 0, mailbox.masked, mailbox.cleaned,
                                mailbox.token[loader.lane], mailbox.page[loader.lane]};
        __syncwarp();
        if (loader.lane == 0) barrier_arrive(loader.memory.batch_empty);
        if (batch.tiles < 0) return;
        loader.load(batch);
    }
}

// One warp that plans and copies: a batch is kept until the next is known, so that the lookups of the next lie ahead
// of the copies of this one.
template <typename Plan>
struct DelayedLoader {
    KeyValueLoader<Plan> loader;
    BoxBatch held{};

    DEVICE void take(const BoxBatch& batch) {
        loader.load(held);
        held = batch;
    }
};

// Starts copies of one item's queries into shared memory, k-major under the 128-byte swizzle; rows past the live ones are zeros.
// Where a row lies is computed once, by one lane: divisions for every 16 bytes kept two warps busy for 12 us an item, at the
// expense of the consumers on the same quarters of the SM.
template <typename Plan>
DEVICE void gather_queries(const PagedParams& p, PagedMemory<Plan>& memory, const WorkItem& w, int thread) {
    using T = typename Plan::Element;
    constexpr int kPieces = Plan::kHeadDim / 8;         // of a row, 16 bytes each
    constexpr int kWarpRows = Plan::kRows / (Plan::kQueryThreads / 32), kGroup = kWarpRows < 32 ? kWarpRows : 32;
    const int lane = thread % 32, piece = lane % kPieces;
    const T* q = static_cast<const T*>(p.q) + w.b * p.q_stride_b;
    for (int first = thread / 32 * kWarpRows; first < (thread / 32 + 1) * kWarpRows; first += kGroup) {
        const int mine = first + lane % kGroup;
        const u64 from = mine < w.count ? u64(q + w.token(p, mine) * p.q_stride_t + w.head(p, mine) * p.q_stride_h) : 0;
#pragma unroll 4
        for (int i = lane / kPieces; i < kGroup; i += 32 / kPieces) {
            const int row = first + i;
            const T* at = reinterpret_cast<const T*>(__shfl_sync(~0u, from, i));
            const u32 to = smem_address(memory.queries[row / 64]) + piece / 8 * Plan::kQueryColumnBytes + row % 64 * 128 + (piece % 8 ^ row % 8) * 16;
            cp_async16(to, at == nullptr ? q : at + piece * 8, at != nullptr);
        }
    }
    cp_async_commit();
}
