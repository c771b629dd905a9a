// The plan of paged block-sparse attention on Hopper: tile sizes, roles, shared memory, work items.
//
// A block has kConsumers warpgroups of 64 packed query rows each (packed row m of a sparse row: query token
// m / group, head m % group), and producer warps behind them. All of a block's warpgroups share one ring of
// K tiles and one of V tiles, kKeys keys each. A tile is made of boxes: kBox keys that are neighbours in one
// page and in one KV block, the unit of copies, of masks and of guards.
#pragma once
#include "common/paged_params.cuh"
#include "sm90/hopper.cuh"

template <typename ElementT, int kHeadDimT, int kConsumersT, int kKeysT, int kBoxT, int kStagesT, bool kCausalT, bool kBitsT,
          bool kQueriesInRegistersT, int kSplitsT, int kBlocksPerSmT>
struct PagedPlan {
    using Element = ElementT;
    static constexpr int kHeadDim = kHeadDimT, kConsumers = kConsumersT, kKeys = kKeysT, kBox = kBoxT, kStages = kStagesT;
    static constexpr bool kCausal = kCausalT, kBits = kBitsT;
    static constexpr bool kQueriesInRegisters = kQueriesInRegistersT;   // A of Q.K^T: spares shared memory a third of its reads
    static constexpr int kSplits = kSplitsT;                            // blocks of a cluster that share one row's list
    static constexpr int kBlocksPerSm = kBlocksPerSmT;

    static constexpr bool kWide = kConsumers > 1;
    static constexpr int kRows = 64 * kConsumers;                       // packed query rows of a block
    static constexpr int kConsumerThreads = 128 * kConsumers;
    static constexpr int kProducerThreads = 128;                        // a whole warpgroup: registers move in such units
    static constexpr int kThreads = kConsumerThreads + kProducerThreads;
    static constexpr int kQueryThreads = 64;                            // producer warps 2 and 3

    // 128 x (56 + 2 x 224) and 2 x 128 x (56 + 200) registers are all there are; a lone block of 256 threads has enough.
    static constexpr bool kMovesRegisters = kWide || kBlocksPerSm == 2;
    static constexpr int kProducerRegisters = 56;
    static constexpr int kConsumerRegisters = (kWide ? 504 - kProducerRegisters : 512 - 2 * kProducerRegisters) / 2;

    static constexpr int kBoxes = kKeys / kBox;                         // boxes of a tile
    static constexpr int kHalves = kHeadDim / 64;                       // 128-byte columns of a tile
    static constexpr int kColumnBytes = kKeys * 128;                    // one such column of K or V
    static constexpr int kQueryColumnBytes = 64 * 128;                  // and of one warpgroup's queries
    static constexpr int kTileBytes = kColumnBytes * kHalves;
    static constexpr int kQueryBytes = kQueryColumnBytes * kHalves;
    static constexpr int kChunk = kHeadDim < 128 ? kHeadDim : 128;      // output columns of one tensor core product
    static constexpr int kChunks = kHeadDim / kChunk;

    // A tile's notes outlive its keys, whose slot may be filled again while they are read: twice as many slots.
    static constexpr int kNotes = 2 * kStages;
    static_assert(kStages >= 2 && kKeys % kBox == 0 && kBox >= 8 && (kKeys == 64 || kKeys == 128));
    static_assert(kSplits == 1 || !kWide);
};

// kRows packed rows of one sparse row. Blocks that run together share a KV head: it is the slower index.
struct WorkItem {
    int b, h, r;
    int first;                                      // packed row of the sparse row that this item starts at
    int count;                                      // live packed rows in it; <= 0 past a ragged end

    template <int kRows>
    DEVICE static int items_per_row(const PagedParams& p) { return ceil_div(min(p.q_block_size, p.seq_len_q) * p.group, kRows); }

    template <int kRows>
    DEVICE static WorkItem of(const PagedParams& p, int index) {
        WorkItem w;
        const int per_row = items_per_row<kRows>(p);
        w.first = index % per_row * kRows;
        index /= per_row;
        w.r = index % p.rows;
        index /= p.rows;
        w.h = index % p.num_kv_heads;
        w.b = index / p.num_kv_heads;
        const int live = min(p.q_block_size, p.seq_len_q - w.r * p.q_block_size) * p.group;
        w.count = min(kRows, live - w.first);
        return w;
    }
    DEVICE int token(const PagedParams& p, int row) const { return r * p.q_block_size + (first + row) / p.group; }
    DEVICE int head(const PagedParams& p, int row) const { return h * p.group + (first + row) % p.group; }
};

constexpr u32 kNoToken = 0x80000000u;               // the first token of a box that nobody sees

template <int kBoxes>
struct TileNotes {
    u32 partial;                                    // some query does not see some key
    u32 token[kBoxes];                              // first logical token of each box
};

// What the blocks of a cluster hand each other at the end; lies over the K ring.
template <typename Plan>
struct PartialResult {
    float out[64][Plan::kHeadDim + 4];              // not normalized; padded against bank conflicts
    float top[64], sum[64];
    float bad;                                      // not 0: the row is bad
};

// 32 boxes of one item on their way from the planning to the copying warp. Bit i of a mask: box i.
struct BoxBatch {
    i32 tiles;                                      // that these boxes make; < 0: there are no more items
    i32 head;
    u32 alive, partial;
    u32 token[32];
    i32 page[32];
};

// What the producer tells the consumers of an item: in shared memory, since they have no registers to spare.
struct RowNotes {
    WorkItem item;
    i32 tiles;                                      // of this block's share; < 0: there are no more items
    i32 length;                                     // live tokens
    i32 bad;                                        // final once the last tile is there
    i32 sees_first, sees_last;                      // last token that the item's first and last query see
};

template <typename Plan>
struct alignas(1024) PagedMemory {
    u8 queries[Plan::kConsumers][Plan::kQueryBytes];
    u8 keys[Plan::kStages][Plan::kTileBytes];
    u8 values[Plan::kStages][Plan::kTileBytes];
    u64 keys_full[Plan::kStages], keys_empty[Plan::kStages];
    u64 values_full[Plan::kStages], values_empty[Plan::kStages];
    u64 queries_full, queries_empty;
    u64 row_full[2], row_empty[2];
    u64 batch_full, batch_empty;
    BoxBatch batch;
    RowNotes rows[2];
    TileNotes<Plan::kBoxes> notes[Plan::kNotes];
};

// Named barriers; 0 is the whole block's.
constexpr int kWarpgroupBarrier = 1;                // + warpgroup
constexpr int kAllConsumersBarrier = 3;
