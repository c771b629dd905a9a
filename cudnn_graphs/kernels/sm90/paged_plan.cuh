// The plan of paged block-sparse attention on Hopper: tile sizes, roles, shared memory, work items.
//
// A block runs kChains rows at a time, independent of each other. A chain has kConsumers warpgroups of 64 packed
// query rows each (packed row m of a sparse row: query token m / group, head m % group), and two rings, of K and of V tiles
// of kKeys keys, or one in which a tile's V takes the place of its K. Producer warps of all chains lie behind the consumers.
// A tile is made of boxes: kBox keys that are neighbours in one page and in one KV block, the unit of copies, of masks and of guards.
#pragma once
#include "common/paged_params.cuh"
#include "sm90/hopper.cuh"

template <typename ElementT, int kHeadDimT, int kConsumersT, int kChainsT, int kKeysT, int kBoxT, int kKeyStagesT, int kValueStagesT, bool kCausalT, bool kBitsT,
          bool kQueriesInRegistersT, int kSplitsT, int kBlocksPerSmT>
struct PagedPlan {
    using Element = ElementT;
    static constexpr int kHeadDim = kHeadDimT, kConsumers = kConsumersT, kChains = kChainsT, kKeys = kKeysT, kBox = kBoxT;
    static constexpr int kKeyStages = kKeyStagesT, kValueStages = kValueStagesT;   // tiles in the rings; 0: V follows K in its slot
    static constexpr bool kCausal = kCausalT, kBits = kBitsT;
    static constexpr bool kQueriesInRegisters = kQueriesInRegistersT;   // A of Q.K^T: spares shared memory a third of its reads
    static constexpr int kSplits = kSplitsT;                            // blocks of a cluster that share one row's list
    static constexpr int kBlocksPerSm = kBlocksPerSmT;

    static constexpr int kRows = 64 * kConsumers;                       // packed query rows of an item
    static constexpr int kChainThreads = 128 * kConsumers;
    static constexpr int kConsumerThreads = kChainThreads * kChains;
    static constexpr int kProducerThreads = 128;                        // a whole warpgroup: registers move in such units
    static constexpr int kThreads = kConsumerThreads + kProducerThreads;
    static constexpr int kRowSlots = kChains == 1 ? 2 : 4;              // items between planning and consumers
    // One chain: a warp copies, one plans, two gather queries. More: a warp each that plans and copies, and consumers that
    // gather their own queries.
    static constexpr bool kOwnQueries = kChains > 1;
    static constexpr int kQueryThreads = kOwnQueries ? 128 : 64;

    // What the block is launched with moves from the producers to the consumers; a lone block of 256 threads has enough.
    static constexpr bool kMovesRegisters = kThreads * kBlocksPerSm > 256;
    static constexpr int kWarpgroups = kThreads / 128;
    static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocksPerSm) / 8 * 8;
    static constexpr int kProducerRegisters = 56;
    static constexpr int kConsumerRegisters = (kLaunchRegisters * kWarpgroups - kProducerRegisters) / (kWarpgroups - 1) / 8 * 8;

    static constexpr int kSlots = kKeyStages + kValueStages;
    static constexpr int kBoxes = kKeys / kBox;                         // boxes of a tile
    static constexpr int kHalves = kHeadDim / 64;                       // 128-byte columns of a tile
    static constexpr int kColumnBytes = kKeys * 128;                    // one such column of K or V
    static constexpr int kQueryColumnBytes = 64 * 128;                  // and of one warpgroup's queries
    static constexpr int kTileBytes = kColumnBytes * kHalves;
    static constexpr int kQueryBytes = kQueryColumnBytes * kHalves;
    static constexpr int kChunk = kHeadDim < 128 ? kHeadDim : 128;      // output columns of one tensor core product
    static constexpr int kChunks = kHeadDim / kChunk;

    // A tile's notes outlive its keys, whose slot may be filled again while they are read: twice as many slots.
    static constexpr int kNotes = 2 * kValueStages;
    static_assert(kValueStages >= 2 && (kKeyStages == kValueStages || kKeyStages == 0) && kKeys % kBox == 0 && kBox >= 8 && (kKeys == 64 || kKeys == 128));
    static_assert(kSplits == 1 || (kConsumers == 1 && kChains == 1));
    static_assert(kChains == 1 || (kChains <= 4 && kConsumers == 1));

    // By a shuffle, after which the compiler knows that a warp agrees on it: addresses of operands stay in uniform registers.
    DEVICE static int chain_of(int thread) { return kChains == 1 ? 0 : __shfl_sync(~0u, thread / kChainThreads, 0); }
    DEVICE static int in_chain(int thread) { return kChains == 1 ? thread : thread % kChainThreads; }
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

// What a tile needs beyond its two products.
enum class Partial : u32 {
    kNo,                                            // every query sees every key
    kMask,                                          // boxes that nobody sees: their keys and values are zeros
    kMaskAndClean,                                  // some query does not see some key of a box that was loaded
};

template <int kBoxes>
struct TileNotes {
    Partial partial;
    u32 token[kBoxes];                              // first logical token of each box
};

// What the blocks of a cluster hand each other at the end; lies over the rings.
template <typename Plan>
struct PartialResult {
    float out[64][Plan::kHeadDim + 4];              // not normalized; padded against bank conflicts
    float top[64], sum[64];
    float bad;                                      // not 0: the row is bad
};

// Up to 32 boxes of one item on their way from planning to copying; every lane has one of them.
struct BoxBatch {
    i32 tiles;                                      // that these boxes make; < 0: there are no more items
    i32 head;
    bool ends;                                      // the item's last
    u32 masked, cleaned;                            // bit i: tiles with box i need it
    u32 token;                                      // kNoToken: nothing to load
    i32 page;
};

// The same in shared memory, between two warps.
struct BatchMailbox {
    i32 tiles, head, ends;
    u32 masked, cleaned;
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

// Of one chain.
template <typename Plan>
struct alignas(1024) PagedMemory {
    u8 queries[Plan::kConsumers][Plan::kQueryBytes];
    u8 ring[Plan::kSlots][Plan::kTileBytes];        // K's slots, then V's
    u64 full[Plan::kSlots], empty[Plan::kSlots];
    u64 queries_full, queries_empty;
    u64 row_full[Plan::kRowSlots], row_empty[Plan::kRowSlots];
    u64 batch_full, batch_empty;
    BatchMailbox batch;
    RowNotes rows[Plan::kRowSlots];
    TileNotes<Plan::kBoxes> notes[Plan::kNotes];
};

// Where a tile stands; its notes lie at `at`. A slot that K and V share is filled and emptied twice a trip: phase 0 is K's.
template <typename Plan>
struct TileCursor : RingCursor<Plan::kValueStages> {
    DEVICE int key_slot() const { return this->slot(); }
    DEVICE int value_slot() const { return Plan::kKeyStages + this->slot(); }
    DEVICE u32 key_phase() const { return Plan::kKeyStages == 0 ? 0 : this->phase(); }
    DEVICE u32 value_phase() const { return Plan::kKeyStages == 0 ? 1 : this->phase(); }
    DEVICE TileCursor before() const { return {RingCursor<Plan::kValueStages>::before()}; }
};

// Named barriers; 0 is the whole block's.
constexpr int kWarpgroupBarrier = 1;                // + warpgroup
constexpr int kChainBarrier = 4;                    // + chain
