// Sage block-sparse attention on Hopper: rows dealt out to pairs of a producer warp and a consumer warpgroup.
#pragma once
#include "sm90/sage_consumer.cuh"
#include "sm90/sage_load.cuh"

template <bool kInterleaved, bool kLse>
DEVICE void sage_attention(const SageParams& p, const SageMaps& maps) {
    extern __shared__ __align__(1024) u8 raw_memory[];
    auto& memory = *reinterpret_cast<SageMemory*>(raw_memory);
    if (threadIdx.x < SagePlan::kConsumers) memory.signals[threadIdx.x].init();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(maps.queries);
        prefetch_tensor_map(maps.keys);
        prefetch_tensor_map(maps.values);
    }
    if (!kLse) {
        for (auto& shared : memory.pairs) shared.set_ones(threadIdx.x, SagePlan::kThreads);
        fence_async_proxy();
    }
    barrier_init_fence();
    __syncthreads();
    const i64 rows = i64(p.batch_heads) * p.rows;
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warpgroup == 0) {
        lower_registers<SagePlan::kProducerRegisters>();
        if (warp < SagePlan::kConsumers) {
            SageProducer<kInterleaved> producer{p, maps, memory.pairs[warp], memory.signals[warp]};
            for (u32 n = 0; row_index(n, warp) < rows; ++n) producer.load_row(SageItem(p, i32(row_index(n, warp))));
        }
    } else {
        raise_registers<SagePlan::kConsumerRegisters>();
        const int pair = warpgroup - 1;
        SageConsumer<kInterleaved, kLse> consumer{p, memory.pairs[pair], memory.signals[pair], pair};
        while (row_index(consumer.rows, pair) < rows) consumer.attend_row();
    }
}
