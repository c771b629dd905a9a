// The plan of Sage block-sparse attention on Hopper: two consumer warpgroups and a producer warp for each, one block
// to an SM, each pair on a row of its own.
//
// A row has 64 queries, half of what one instruction stream can keep the tensor cores busy with; two rows side by side
// share the SM instead. Within a row the scores of the next key block and P.V of the last one are computed while the
// probabilities of this one are made, so neither waits. The producers run ahead, past the ends of rows, so a row
// begins with its queries and keys already there.
#pragma once
#include "common/sage_rows.cuh"
#include "common/sage_tile.cuh"
#include "sm90/hopper.cuh"

struct SagePlan {
    static constexpr int kConsumers = 2;
    static constexpr int kThreads = 128 * (1 + kConsumers);     // the first warpgroup's warps 0 and 1 produce
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;     // 128 x (40 + 2 x 232) <= 65536
    static constexpr int kStages = 6;                           // key blocks in shared memory, per consumer
    static constexpr int kNotes = 8;                            // a block's notes outlive its keys
    static constexpr int kTileBytes = kSageBlock * kSageDim;    // of Q and K [64][128] and of V [128][64] alike
    static_assert(kNotes >= kStages + 2 && (kNotes & kNotes - 1) == 0);
};

struct alignas(16) SageNotes {
    i32 id;
    i32 valid;                  // leading visible tokens; 0: a row without any block
    float scale;                // of K
    i32 flags;
};
constexpr i32 kLastOfRow = 1;
constexpr i32 kPastEnd = 2;     // a box would run past K's last row: the consumer loads these keys itself

// What comes with a row's queries.
struct SageRowScales {
    alignas(16) float v[kSageDim];
    float q[2];                 // per 32 queries, times softmax_scale * log2(e)
};

// What one producer and its consumer share. Q and K lie under the 128-byte swizzle, V under the 64-byte swizzle.
struct alignas(1024) SageLane {
    u8 queries[2][SagePlan::kTileBytes];
    u8 keys[SagePlan::kStages][SagePlan::kTileBytes];
    u8 values[SagePlan::kStages][SagePlan::kTileBytes];
};

struct SageSignals {
    u64 queries_full[2], queries_empty[2];
    u64 keys_full[SagePlan::kStages], keys_empty[SagePlan::kStages];
    u64 values_full[SagePlan::kStages], values_empty[SagePlan::kStages];
    SageNotes notes[SagePlan::kNotes];
    SageRowScales scales[2];

    DEVICE void init() {
        for (int i = 0; i < 2; ++i) {
            barrier_init(queries_full[i], 1);
            barrier_init(queries_empty[i], 4);
        }
        for (int i = 0; i < SagePlan::kStages; ++i) {
            barrier_init(keys_full[i], 1);
            barrier_init(values_full[i], 1);
            barrier_init(keys_empty[i], 4);             // one arrival a warp
            barrier_init(values_empty[i], 4);
        }
    }
};

struct SageMemory {
    SageLane lanes[SagePlan::kConsumers];
    SageSignals signals[SagePlan::kConsumers];
};

struct SageMaps {
    TensorMap queries, keys, values;
};
