// PTX that exists on Hopper only: transaction barriers, bulk tensor copies, register reallocation, clusters.
#pragma once
#include "common/ptx.cuh"

// ---- mbarriers: a phase ends when the expected arrivals and bytes are all in.

DEVICE void barrier_init(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to the copy engine and to the cluster; a block barrier must follow.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u64& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}
DEVICE void barrier_arrive_expect(u64& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u64& barrier, u32 phase) {
    const u32 address = smem_address(&barrier);
    u32 done = 0;
    while (done == 0)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(address), "r"(phase) : "memory");
}

// Where a reader or writer stands in a ring of kSlots; in one register, counting two trips around.
template <int kSlots>
struct RingCursor {
    int at = 0;
    DEVICE int slot() const { return at < kSlots ? at : at - kSlots; }
    DEVICE u32 phase() const { return at >= kSlots; }
    DEVICE void advance() { at = at + 1 == 2 * kSlots ? 0 : at + 1; }
    DEVICE RingCursor before() const { return {at == 0 ? 2 * kSlots - 1 : at - 1}; }
};

// ---- Bulk tensor copies. The map travels by value in the launch.

struct alignas(64) TensorMap { u64 opaque[16]; };

DEVICE void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

DEVICE void load_box(u32 to, const TensorMap& map, u64& barrier, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(smem_address(&barrier)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Ordinary stores to shared memory, before tensor cores or the copy engine touch the same bytes.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Registers of a warpgroup, per thread.

template <int kRegisters> DEVICE void raise_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters> DEVICE void lower_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// threadIdx.x, read again. What a rare branch derives from it cannot be kept in registers across the loop around it.
DEVICE int thread_index_again() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// ---- Named barriers beyond the plain one.

// A barrier that tells every thread whether any of them brought true.
DEVICE bool named_barrier_any(int id, int threads, bool mine) {
    u32 any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 q, %3, 0; bar.red.or.pred p, %1, %2, q; selp.u32 %0, 1, 0, p;}"
                 : "=r"(any) : "r"(id), "r"(threads), "r"(u32(mine)) : "memory");
    return any != 0;
}

// ---- Clusters: shared memory of the other blocks.

DEVICE int cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address, in the cluster's window, of another block's copy of `local`.
DEVICE u32 peer_address(const void* local, int rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(local)), "r"(rank));
    return address;
}
DEVICE float load_peer(u32 address) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
DEVICE float4 load_peer4(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}
