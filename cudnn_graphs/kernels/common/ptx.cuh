// PTX of SM80 and later, one instruction a wrapper: 16-byte asynchronous copies, fragment loads, tensor core products.
#pragma once
#include "common/numeric.cuh"
#include "common/types.cuh"

// The 32-bit address of shared memory that these instructions take.
DEVICE u32 smem_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// 16 bytes to shared memory, past L1.
DEVICE void cp_async16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same; zeros when !valid, and then nothing is read.
DEVICE void cp_async16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void prefetch_l1(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's youngest groups are still under way.
template <int kPending>
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// To a global address that came as a number, of whose space the compiler knows nothing.
DEVICE void store_global16(u64 to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// A load that stays where it is written.
DEVICE uint4 load_shared16(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i to 8i + 7 give the row addresses of matrix i.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// c += a.b, 16 x 8 x 16, fp32 accumulators.
template <typename T> DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void mma_16x8x16<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma_16x8x16<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A barrier of `threads` threads; id 0 is __syncthreads.
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
