// Sage block-sparse attention on Hopper: rows dealt out to pairs of a producer warp and a consumer warpgroup.
#pragma once
#include "sm90/sage_consumer.cuh"
#include "sm90/sage_load.cuh"

// The rows of one pair. Pairs that run together are at neighbouring rows, so at one head's K and V.
template <typename Work>
DEVICE void for_each_row(const SageParams& p, int pair, Work&& work) {
    const i32 items = p.batch_heads * p.rows;
    for (i64 i = i64(blockIdx.x) * SagePlan::kConsumers + pair; i < items; i += i64(gridDim.x) * SagePlan::kConsumers) work(SageItem(p, i32(i)));
}

template <bool kInterleaved>
DEVICE void sage_attention(const SageParams& p, const SageMaps& maps) {
    extern __shared__ __align__(1024) u8 raw_memory[];
    auto& memory = *reinterpret_cast<SageMemory*>(raw_memory);
    if (threadIdx.x < SagePlan::kConsumers) memory.signals[threadIdx.x].init();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(maps.queries);
        prefetch_tensor_map(maps.keys);
        prefetch_tensor_map(maps.values);
    }
    barrier_init_fence();
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warpgroup == 0) {
        lower_registers<SagePlan::kProducerRegisters>();
        if (warp < SagePlan::kConsumers) {
            SageProducer<kInterleaved> producer{p, maps, memory.lanes[warp], memory.signals[warp]};
            for_each_row(p, warp, [&](const SageItem& item) { producer.load_row(item); });
        }
    } else {
        raise_registers<SagePlan::kConsumerRegisters>();
        const int pair = warpgroup - 1;
        SageConsumer<kInterleaved> consumer{p, memory.lanes[pair], memory.signals[pair], pair};
        for_each_row(p, pair, [&](const SageItem& item) { consumer.attend_row(item); });
    }
}
