// The plan of Sage block-sparse attention on Hopper: three consumer warpgroups and a producer warp for each, one block
// to an SM, each pair on a row of its own, two key blocks a step.
//
// A step is a chain: Q.K^T, probabilities, P.V, the sum of outputs. Nothing overlaps within a warpgroup; the other two
// are at other links of theirs. Measured (S1, one H200): 834 TOPS so, 862 with P summed by the tensor cores, 690 with two
// warpgroups, 614 with two that computed the scores of the next 64 keys under the probabilities of these. The copies alone
// would reach 1170. The producers run ahead, past the ends of rows.
#pragma once
#include "common/sage_rows.cuh"
#include "common/sage_tile.cuh"
#include "sm90/hopper.cuh"

struct SagePlan {
    static constexpr int kConsumers = 3;
    static constexpr int kThreads = 128 * (1 + kConsumers);     // the first warpgroup's first warps produce
    static constexpr int kProducerRegisters = 32, kConsumerRegisters = 160;     // 128 x (32 + 3 x 160) = 65536
    static constexpr int kStages = 2;                           // steps in shared memory, per consumer
    static constexpr int kNotes = 2 * kStages;                  // a step's notes outlive its keys
    static constexpr int kTileBytes = kSageBlock * kSageDim;    // of Q and K [64][128] and of V [128][64] alike
    static constexpr int kOnesBytes = 8 * kSageBlock;           // [8][64] below each V: ones, then zeros
};

// Of one step, whose second block may be missing.
struct alignas(16) SageNotes {
    float scale[2];             // of K
    short valid[2];             // leading visible tokens; 0: no such block
    i32 last;                   // of its row
};

// What comes with a row's queries.
struct SageRowScales {
    alignas(16) float v[kSageDim];
    float q[2];                 // per 32 queries, times softmax_scale * log2(e)
};

// What one producer and its consumer share. Q and K lie under the 128-byte swizzle, V under the 64-byte swizzle.
struct alignas(1024) SagePair {
    u8 queries[SagePlan::kTileBytes];
    u8 keys[SagePlan::kStages][2][SagePlan::kTileBytes];
    u8 values[SagePlan::kStages][2][SagePlan::kTileBytes + SagePlan::kOnesBytes];

    // For tensor cores to see: what they sum of P with it is column 128 of P.V.
    DEVICE void set_ones(int thread, int threads) {
        for (int i = thread; i < SagePlan::kStages * 2 * SagePlan::kOnesBytes / 4; i += threads) {
            const int tile = i / (SagePlan::kOnesBytes / 4), word = i % (SagePlan::kOnesBytes / 4);
            reinterpret_cast<u32*>(values[tile / 2][tile % 2] + SagePlan::kTileBytes)[word] = word < kSageBlock / 4 ? 0x38383838 : 0;
        }
    }
};

struct SageSignals {
    u64 queries_full, queries_empty;
    u64 keys_full[SagePlan::kStages], keys_empty[SagePlan::kStages];
    u64 values_full[SagePlan::kStages], values_empty[SagePlan::kStages];
    SageNotes notes[SagePlan::kNotes];
    SageRowScales scales[2];

    DEVICE void init() {
        barrier_init(queries_full, 1);
        barrier_init(queries_empty, 4);                 // one arrival a warp
        for (int i = 0; i < SagePlan::kStages; ++i) {
            barrier_init(keys_full[i], 1);
            barrier_init(values_full[i], 1);
            barrier_init(keys_empty[i], 4);
            barrier_init(values_empty[i], 4);
        }
    }
};

struct SageMemory {
    SagePair pairs[SagePlan::kConsumers];
    SageSignals signals[SagePlan::kConsumers];
};

// The n'th row of a pair. Pairs that run together are at neighbouring rows, so at one head's K and V. What is left for the
// last round goes to blocks of its own.
DEVICE i64 row_index(u32 n, int pair) { return (i64(n) * SagePlan::kConsumers + pair) * gridDim.x + blockIdx.x; }

struct SageMaps {
    TensorMap queries, keys, values;
};
