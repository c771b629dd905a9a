// The union kernel: one persistent CTA an SM, its roles wired together.
#pragma once
#include "sm90/qsa_consumer.cuh"
#include "sm90/qsa_loader.cuh"
#include "sm90/qsa_scout.cuh"

template <typename Plan>
DEVICE void init_barriers(QsaUnionMemory<Plan>& memory) {
    for (int i = 0; i < Plan::kSteps; ++i) {
        barrier_init(memory.step_full[i], 1);
        barrier_init(memory.step_empty[i], Plan::kConsumerWarps + Plan::kLoaderWarps);
    }
    for (int i = 0; i < Plan::kStages; ++i) {
        barrier_init(memory.keys_full[i], Plan::kLoaderThreads);
        barrier_init(memory.keys_empty[i], Plan::kConsumerWarps);
        barrier_init(memory.values_full[i], Plan::kLoaderThreads);
        barrier_init(memory.values_empty[i], Plan::kConsumerWarps);
    }
    barrier_init(memory.queries_full, Plan::kLoaderThreads);
    barrier_init(memory.queries_empty, Plan::kConsumerWarps);
    barrier_init_fence();
}

template <typename Plan>
DEVICE void qsa_union(const QsaParams& p) {
    if (threadIdx.x == 0) init_barriers(qsa_memory<Plan>());
    const int items = ceil_div(p.num_tokens, Plan::kQueries) * p.num_kv_heads;
    for (int i = blockIdx.x * Plan::kThreads + threadIdx.x; i < items; i += gridDim.x * Plan::kThreads)
        if (p.item_mode[i] == kGatherMode) leave_to_gather(p, i);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp >= Plan::kConsumerWarps) {
        lower_registers<Plan::kProducerRegisters>();
        if (warp == Plan::kConsumerWarps) Scout<Plan>(p).run();
        else Loader<Plan>(p).run();
    } else {
        raise_registers<Plan::kConsumerRegisters>();
        Consumer<Plan>(p).run();
    }
}
