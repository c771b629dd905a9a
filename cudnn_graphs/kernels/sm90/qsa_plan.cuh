// The plan of packed query-sparse attention on Hopper: several neighbouring queries x a group's heads fill the
// M tile of wgmma over the union of their selections, and every row is masked by its own bits.
//
// An item is (tile of kQueries queries, KV head). One scout warp walks the bitmap of an item's queries and
// cuts the union into steps of 64 keys; three warps gather those keys; two warpgroups compute, each with half
// of the queries. Neighbours agree on most blocks (Jaccard 0.9 at T = 8192: the union of 10 is 1.23 times one
// query's own), and a key is read once for all of them, so the tensor cores are the limit and not L2.
#pragma once
#include "common/qsa_selection.cuh"
#include "sm90/hopper.cuh"

// kTaintedMode: was packed, and its accumulators are not finite.
enum QsaMode : i32 { kUnionMode, kGatherMode, kTaintedMode };

template <int kGroupT>
struct QsaUnionPlan {
    static constexpr int kGroup = kGroupT;
    static constexpr int kWgQueries = 64 / kGroup < 8 ? 64 / kGroup : 8;
    static constexpr int kQueries = 2 * kWgQueries;             // of a tile; a bit each in 16
    static constexpr int kKeys = 64, kBlocks = kKeys / kQsaBlock;   // of a step
    static constexpr int kStages = 2;
    static constexpr int kSteps = 8;                            // whose notes are kept: the scout is up to that many ahead
    static constexpr int kScan = 512;                           // blocks the scout looks at in one go: 16 a lane
    static constexpr int kScanRowBytes = kScan + 16;            // whatever the alignment of a bitmap row
    static constexpr int kPending = kScan + kBlocks;

    static constexpr int kConsumerWarps = 8, kLoaderWarps = 3, kLoaderThreads = 32 * kLoaderWarps;
    static constexpr int kThreads = 32 * (kConsumerWarps + 1 + kLoaderWarps);
    // The CTA starts with 168 a thread and trades among its own: with more than that in all, a raise waits for ever.
    static constexpr int kConsumerRegisters = 208, kProducerRegisters = 88;
    static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);

    static constexpr int kColumns = kQsaDim / 64;               // 128-byte columns of a tile
    static constexpr int kColumnBytes = 64 * 128;               // one of them, 64 rows
    static constexpr int kTileBytes = kColumns * kColumnBytes;  // 64 rows of Q, K or V

    static_assert(kQueries <= 16);
};

constexpr u32 kFirstStep = 1, kLastStep = 2, kNoMoreWork = 4;

// The bit of a step's key in a mask of 64: the sixteen keys that one thread of wgmma's accumulator layout holds of a row,
// 8 j + 2 lane + {0, 1} for j = 0 to 7 and lane of a quad, lie together, in order.
DEVICE constexpr int key_of_bit(int bit) { return bit % 16 / 2 * 8 + bit / 16 * 2 + bit % 2; }
DEVICE constexpr int bit_of_key(int key) { return key % 8 / 2 * 16 + key / 8 * 2 + key % 2; }

template <typename Plan>
struct StepNotes {
    u16 rows[Plan::kQueries][4];    // a bit per key of the step that the query attends, by the lane of a quad that holds it
    u64 seen;                       // the union of those
    i32 first[Plan::kBlocks];       // first token of every block
    i32 item;
    u32 flags;
};

template <typename Plan>
struct alignas(1024) QsaUnionMemory {
    u8 queries[2][Plan::kTileBytes];
    u8 keys[Plan::kStages][Plan::kTileBytes];
    u8 values[Plan::kStages][Plan::kTileBytes];
    u8 bitmap[2][Plan::kQueries][Plan::kScanRowBytes];
    i32 pending_first[Plan::kPending];          // blocks found and not yet in a step: first token,
    u32 pending_owners[Plan::kPending];         // a bit per query; tokens of the block << 16
    StepNotes<Plan> steps[Plan::kSteps];
    u64 step_full[Plan::kSteps], step_empty[Plan::kSteps];
    u64 keys_full[Plan::kStages], keys_empty[Plan::kStages];
    u64 values_full[Plan::kStages], values_empty[Plan::kStages];
    u64 queries_full, queries_empty;
};

// At file scope, so that addresses are constants and cost no registers.
extern __shared__ __align__(1024) u8 qsa_union_smem[];
template <typename Plan>
DEVICE QsaUnionMemory<Plan>& qsa_memory() { return *reinterpret_cast<QsaUnionMemory<Plan>*>(qsa_union_smem); }

// The slot of the n-th use of a ring, and the parity of that trip around it.
template <int kSlots> DEVICE u32 slot_of(u32 n) { return n % kSlots; }
template <int kSlots> DEVICE u32 trip_of(u32 n) { return n / kSlots & 1; }

// Hands an item to the gather kernel, which runs next.
DEVICE void leave_to_gather(const QsaParams& p, int item) { p.gather_items[atomicAdd(&p.schedule->gather_count, 1)] = item; }
