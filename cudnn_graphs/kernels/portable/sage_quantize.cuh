// The Sage quantizer, one launch: K's mean over its tokens and V's largest magnitudes, then the conversions.
//
// K and V are read twice. So that the second read finds them in L2, work is a list of tasks of 64 tokens, drawn in order
// from one counter: a head's K is converted while its V is scanned, and so on, a little late so that conversions seldom
// wait. They wait for tasks drawn before them only, so however few blocks are resident, the oldest can always go on.
//
// A task goes from registers to registers: 128 threads, 8 channels of 8 consecutive tokens each. How many such blocks
// an SM has is `_blocks_per_sm` of engines/sage_quantizer.py.
//
// The arithmetic and its order are those of reference/sage_quantize.py: both sides agree bit for bit.
#pragma once
#include "common/sage_quantize_params.cuh"
#include "portable/sage_elements.cuh"
#include "portable/sage_fp8.cuh"

struct SageQuantizeConfig {
    static constexpr int kThreads = 128;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kTokens = 64;          // per task, and per scale of K
    static constexpr int kDim = 128;
    static constexpr int kColumns = kDim / 8;   // a thread has 8 channels ...
    static constexpr int kRows = 8;             // ... of 8 consecutive tokens
    static constexpr int kSumLanes = 32;        // running sums of block sums
    static constexpr int kLag = 1024;           // tasks from the last look at a head's K or V to its first conversion
};

// x / d in three operations, rounded as division rounds it: `r` is the rounded reciprocal, the remainder is exact.
// The remainder is taken negative so that -0 stays -0.
struct Divisor {
    float d, r;
    Divisor() = default;
    DEVICE explicit Divisor(float by) : d(by), r(__fdiv_rn(1.0f, by)) {}
    DEVICE float divide(float x) const {
        float quotient = __fmul_rn(x, r);
        return __fmaf_rn(-__fmaf_rn(quotient, d, -x), r, quotient);
    }
};

DEVICE float scale_of(float amax, float largest) { return __fdiv_rn(amax < 1e-7f ? 1e-7f : amax, largest); }     // NaN stays NaN

// ---- Between blocks. Thread 0 speaks for its block, between two block barriers.

DEVICE u32 tell(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before + 1;
}
DEVICE void await(const u32* counter, u32 value) {
    for (;;) {
        u32 x;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
        if (x == value) return;
        __nanosleep(100);
    }
}
DEVICE float load_l2(const float* p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
DEVICE float4 load_l2(const float4* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
    return x;
}
DEVICE void store_streaming(void* p, u32 lo, u32 hi) { asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(lo), "r"(hi) : "memory"); }
DEVICE void store_streaming(void* p, const u32 (&w)[4]) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

struct SageQuantizeShared {
    using C = SageQuantizeConfig;
    u32 drawn, told, amax[C::kWarps];
    union {
        float sums[C::kWarps][C::kDim];
        u32 peaks[C::kWarps][C::kDim];
        struct {
            alignas(16) float scale[C::kDim], reciprocal[C::kDim];
            alignas(16) u8 bytes[C::kDim * C::kTokens];
        } v;
    };
};

template <typename T, bool kVector>     // kVector: rows are contiguous and 16-byte aligned
struct SageQuantizer {
    using C = SageQuantizeConfig;
    using Rows = RawRow<T>[C::kRows];
    const SageQuantizeParams& p;
    SageQuantizeShared& shared;
    const int tid, lane = tid % 32, warp = tid / 32;
    const int column = tid % C::kColumns;               // channels 8 * column ...
    const int group = tid / C::kColumns;                // ... of tokens 8 * group ... of the task

    // Tokens past the last are zeros. What is read for the last time leaves L2 first.
    DEVICE void load(Rows& x, const void* base, const Strides4& strides, int head, int block, i32 tokens, bool last_use) const {
        const i32 first = block * C::kTokens + C::kRows * group;
        const T* at = static_cast<const T*>(base) + head / p.heads * strides.b + head % p.heads * strides.h + first * strides.s + i64(8 * column) * strides.d;
#pragma unroll
        for (int i = 0; i < C::kRows; i++, at += strides.s) {
            const bool exists = first + i < tokens;
            if (kVector) x[i].load(at, exists, last_use);
            else x[i].gather(at, strides.d, exists);
        }
    }

    // What thread 0 makes of a counter, known to the whole block, which sees what was told there.
    template <typename Ask>
    DEVICE u32 ask(Ask&& question) const {
        __syncthreads();
        if (tid == 0) shared.told = question();
        __syncthreads();
        return shared.told;
    }

    // Neighbour by neighbour: the 8 tokens of a thread, the 16 of a warp, the 64 of the block.
    template <int kCount>
    DEVICE static float sum_of(const Rows& x, int first, int c) {
        if constexpr (kCount == 1) return x[first].at(c);
        else return sum_of<kCount / 2>(x, first, c) + sum_of<kCount / 2>(x, first + kCount / 2, c);
    }

    DEVICE void sum_k(int head, int block) const {
        Rows x;
        load(x, p.k, p.k_strides, head, block, p.seq_len_k, false);
        float s[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            s[c] = sum_of<C::kRows>(x, 0, c);
            s[c] += __shfl_xor_sync(~0u, s[c], C::kColumns);
        }
        if (lane < C::kColumns) {
            float4* out = reinterpret_cast<float4*>(shared.sums[warp] + 8 * column);
            out[0] = {s[0], s[1], s[2], s[3]};
            out[1] = {s[4], s[5], s[6], s[7]};
        }
        __syncthreads();
        p.block_sums[(i64(head) * p.num_blocks + block) * C::kDim + tid] = (shared.sums[0][tid] + shared.sums[1][tid]) + (shared.sums[2][tid] + shared.sums[3][tid]);
        const int n = block % C::kSumLanes;
        if (ask([&] { return tell(p.blocks_done(head, n)); }) == ceil_div(p.num_blocks - n, C::kSumLanes)) sum_blocks(head, n);
    }

    // Running sum n of 32: every 32nd block from block n on.
    DEVICE void sum_blocks(int head, int n) const {
        const float* sums = p.block_sums + i64(head) * p.num_blocks * C::kDim + tid;
        float sum = 0.0f;
#pragma unroll 16
        for (i64 block = n; block < p.num_blocks; block += C::kSumLanes) sum += load_l2(sums + block * C::kDim);
        p.lane_sums[(i64(head) * C::kSumLanes + n) * C::kDim + tid] = sum;
        if (ask([&] { return tell(p.lanes_done(head)); }) == min(p.num_blocks, C::kSumLanes)) finish_mean(head);
    }

    template <int kCount>
    DEVICE float sum_of_lanes(const float* sums, int first) const {
        if constexpr (kCount == 1) return first < p.num_blocks ? load_l2(sums + first * C::kDim) : 0.0f;
        else return sum_of_lanes<kCount / 2>(sums, first) + sum_of_lanes<kCount / 2>(sums, first + kCount / 2);
    }

    DEVICE void finish_mean(int head) const {
        const float total = sum_of_lanes<C::kSumLanes>(p.lane_sums + i64(head) * C::kSumLanes * C::kDim + tid, 0);
        p.k_mean[i64(head) * C::kDim + tid] = __fdiv_rn(total, float(p.seq_len_k));
        __syncthreads();
        if (tid == 0) tell(p.mean_ready(head));
    }

    // As integers magnitudes keep their order, with NaN on top.
    DEVICE void scan_v(int head, int block) const {
        Rows x;
        load(x, p.v, p.v_strides, head, block, p.seq_len_k, false);
        const Peak<T> peak = peak_of(x);
        u32 amax[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
            amax[c] = __float_as_uint(peak.at(c));
            amax[c] = max(amax[c], __shfl_xor_sync(~0u, amax[c], C::kColumns));
        }
        if (lane < C::kColumns) {
            uint4* out = reinterpret_cast<uint4*>(shared.peaks[warp] + 8 * column);
            out[0] = {amax[0], amax[1], amax[2], amax[3]};
            out[1] = {amax[4], amax[5], amax[6], amax[7]};
        }
        __syncthreads();
        atomicMax(p.v_amax + i64(head) * C::kDim + tid, max(max(shared.peaks[0][tid], shared.peaks[1][tid]), max(shared.peaks[2][tid], shared.peaks[3][tid])));
        __syncthreads();
        if (tid == 0) tell(p.scans_done(head));
    }

    DEVICE static Peak<T> peak_of(const Rows& x) {
        Peak<T> peak(x[0]);
#pragma unroll
        for (int i = 1; i < C::kRows; i++) peak.add(x[i]);
        return peak;
    }

    // The largest of the warps' magnitudes, each warp's now in shared.amax.
    DEVICE void share_amax(float mine) const {
        const u32 amax = __reduce_max_sync(~0u, __float_as_uint(mine));
        if (lane == 0) shared.amax[warp] = amax;
        __syncthreads();
    }
    DEVICE float shared_amax(int first, int count) const {
        u32 most = shared.amax[first];
        for (int i = 1; i < count; i++) most = max(most, shared.amax[first + i]);
        return __uint_as_float(most);
    }

    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low byte.
    DEVICE static void store_int8(u8* out, const float (&x)[8], const Divisor& by) {
        u32 b[8];
#pragma unroll
        for (int c = 0; c < 8; c++) b[c] = __float_as_uint(by.divide(x[c]) + 12582912.0f);
        store_streaming(out, __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410),
                        __byte_perm(__byte_perm(b[4], b[5], 0x0040), __byte_perm(b[6], b[7], 0x0040), 0x5410));
    }

    // Each half of the block has its own 32 queries, and its own scale.
    DEVICE void convert_q(int head, int block) const {
        Rows x;
        load(x, p.q, p.q_strides, head, block, p.seq_len_q, true);
        const Peak<T> peak = peak_of(x);
        float amax = peak.at(0);
#pragma unroll
        for (int c = 1; c < 8; c++) amax = max_or_nan(amax, peak.at(c));
        share_amax(amax);
        const int half = warp / 2;
        const float scale = scale_of(shared_amax(2 * half, 2), 127.0f);
        if (tid % 64 == 0) p.q_scale[i64(head) * (ceil_div(p.seq_len_q, 128) * 4) + 2 * block + half] = scale;
        const float no_mean[8] = {};
        store_rows(p.q_int8, x, no_mean, head, block, p.seq_len_q, scale);
    }

    DEVICE void convert_k(int head, int block) const {
        Rows x;
        load(x, p.k, p.k_strides, head, block, p.seq_len_k, true);
        float mean[8] = {};
        if (p.smooth_k) {
            if (tid == 0) await(p.mean_ready(head), 1);
            __syncthreads();
            const float4* means = reinterpret_cast<const float4*>(p.k_mean + i64(head) * C::kDim + 8 * column);
            const float4 a = load_l2(means), b = load_l2(means + 1);
            mean[0] = a.x, mean[1] = a.y, mean[2] = a.z, mean[3] = a.w, mean[4] = b.x, mean[5] = b.y, mean[6] = b.z, mean[7] = b.w;
        }
        const i32 first = block * C::kTokens + C::kRows * group;
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < C::kRows; i++) {
            float most = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; c++) most = max_or_nan(most, fabsf(x[i].at(c) - mean[c]));
            if (first + i < p.seq_len_k) amax = max_or_nan(amax, most);
        }
        share_amax(amax);
        const float scale = scale_of(shared_amax(0, C::kWarps), 127.0f);
        if (tid == 0) p.k_scale[i64(head) * p.num_blocks + block] = scale;
        store_rows(p.k_int8, x, mean, head, block, p.seq_len_k, scale);
    }

    DEVICE void store_rows(u8* to, const Rows& x, const float (&mean)[8], int head, int block, i32 tokens, float scale) const {
        const Divisor by(scale);
        const i32 first = block * C::kTokens + C::kRows * group;
        u8* out = to + (i64(head) * tokens + first) * C::kDim + 8 * column;
#pragma unroll
        for (int i = 0; i < C::kRows; i++) {
            float y[8];
#pragma unroll
            for (int c = 0; c < 8; c++) y[c] = x[i].at(c) - mean[c];
            if (first + i < tokens) store_int8(out + i * C::kDim, y, by);
        }
    }

    // Bytes are transposed in shared memory: rows of 64 tokens, channel 8 * column + c at row 16 * c + column, 8-byte units
    // of a row at unit ^ (column / 2), so that no two threads of a half warp meet in a bank.
    DEVICE void convert_v(int head, int block) const {
        Rows x;
        load(x, p.v, p.v_strides, head, block, p.seq_len_k, true);
        if (tid == 0) await(p.scans_done(head), p.num_blocks);
        __syncthreads();
        const Divisor mine(scale_of(load_l2(reinterpret_cast<const float*>(p.v_amax) + i64(head) * C::kDim + tid), 448.0f));
        if (block == 0) p.v_scale[i64(head) * C::kDim + tid] = mine.d;
        shared.v.scale[tid] = mine.d;
        shared.v.reciprocal[tid] = mine.r;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 8; c++) {
            Divisor by;
            by.d = shared.v.scale[8 * column + c];
            by.r = shared.v.reciprocal[8 * column + c];
            u32 bytes[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                bytes[i] = pack_e4m3x4(by.divide(x[4 * i].at(c)), by.divide(x[4 * i + 1].at(c)), by.divide(x[4 * i + 2].at(c)), by.divide(x[4 * i + 3].at(c)));
            *reinterpret_cast<uint2*>(shared.v.bytes + (16 * c + column) * C::kTokens + (group ^ column / 2) * 8) = {bytes[0], bytes[1]};
        }
        __syncthreads();
        const i64 padded = i64(p.num_blocks) * C::kTokens;
        u8* out = p.v_fp8 + i64(head) * C::kDim * padded + i64(block) * C::kTokens;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = C::kThreads / 4 * i + tid / 4, unit = tid % 4, column = row % C::kColumns, channel = 8 * column + row / C::kColumns;
            const uint4 w = *reinterpret_cast<const uint4*>(shared.v.bytes + row * C::kTokens + (unit ^ column / 4) * 16);
            const bool swapped = column / 2 % 2;
            const u32 a = swapped ? w.z : w.x, b = swapped ? w.w : w.y, c = swapped ? w.x : w.z, d = swapped ? w.y : w.w;
            const u32 natural[4] = {a, b, c, d};
            const u32 mixed[4] = {__byte_perm(a, c, 0x5410), __byte_perm(a, c, 0x7632), __byte_perm(b, d, 0x5410), __byte_perm(b, d, 0x7632)};
            store_streaming(out + channel * padded + unit * 16, p.interleaved ? mixed : natural);
        }
    }

    // Sums of K or scans of V, whichever the r'th block of all K and V is: head by head, first K, then V.
    DEVICE void look(i32 r) const {
        const i32 block = r % (2 * p.num_blocks), head = r / (2 * p.num_blocks);
        if (block >= p.num_blocks) scan_v(head, block - p.num_blocks);
        else if (p.smooth_k) sum_k(head, block);
    }
    DEVICE void convert(i32 r) const {
        const i32 block = r % (2 * p.num_blocks), head = r / (2 * p.num_blocks);
        if (block >= p.num_blocks) convert_v(head, block - p.num_blocks);
        else convert_k(head, block);
    }

    // Of five tasks two look at a block, two convert one that was looked at long ago, one converts queries. False: nothing is left.
    DEVICE bool work(u32 drawn) const {
        const i32 round = drawn / 5, kind = drawn % 5, blocks_q = ceil_div(p.seq_len_q, 128) * 2;
        const i32 lag = p.num_blocks + C::kLag, all_q = p.batch_heads * blocks_q, all_kv = 2 * p.batch_heads * p.num_blocks;
        if (round >= max(all_q, ceil_div(all_kv + lag, 2))) return false;
        const i32 r = 2 * round + kind / 2 - (kind % 2 == 0 ? 0 : lag);
        if (kind == 4) {
            if (round < all_q) convert_q(round / blocks_q, round % blocks_q);
        } else if (0 <= r && r < all_kv) {
            if (kind % 2 == 0) look(r);
            else convert(r);
        }
        return true;
    }
};

template <typename T, bool kVector>
DEVICE void sage_quantize(const SageQuantizeParams& p) {
    __shared__ SageQuantizeShared shared;
    u32 next = 0;
    if (threadIdx.x == 0) next = atomicAdd(p.progress, 1);
    for (;;) {
        __syncthreads();                                        // the last task is done with shared memory
        if (threadIdx.x == 0) shared.drawn = next;
        __syncthreads();
        if (threadIdx.x == 0) next = atomicAdd(p.progress, 1);  // its latency passes under the task
        int tid;                                                // read again, or what follows from it is kept across tasks, and spills
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
        if (!SageQuantizer<T, kVector>{p, shared, tid}.work(shared.drawn)) return;
    }
}
