// The Sage quantizer, one launch: K's mean over its tokens and V's largest magnitudes, then the conversions.
//
// K and V are read twice. So that the second read finds them in L2, work is a list of tasks ordered head by head,
// drawn in order from one counter. Each is done by one warp, and warps never wait for their block: 64 tokens, copied
// to the warp's own part of shared memory. A task that needs a whole head waits for tasks drawn before it, and a warp
// does its tasks in the order drawn; so however few warps are resident, the oldest task can always go on.
//
// The arithmetic and its order are those of reference/sage_quantize.py: both sides agree bit for bit.
#pragma once
#include "common/ptx.cuh"
#include "common/sage_quantize_params.cuh"
#include "portable/sage_elements.cuh"
#include "portable/sage_fp8.cuh"

struct SageQuantizeConfig {
    static constexpr int kTokens = 64;          // per task, and per scale of K
    static constexpr int kDim = 128;
    static constexpr int kColumns = kDim / 8;   // a lane has 8 channels ...
    static constexpr int kRows = kTokens / 2;   // ... of 32 tokens, those of its half of the warp
    static constexpr int kSumLanes = 32;        // running sums of block sums
};

// Tasks of one head, in order. K is converted last: its mean takes two steps after the sums.
enum class SageTask { kSumK, kScanV, kSumBlocks, kConvertQ, kFinishMean, kConvertV, kConvertK, kNone };

// x / d in three operations, rounded as division rounds it: `r` is the rounded reciprocal, the remainder is exact.
// The remainder is taken negative so that -0 stays -0.
struct Divisor {
    float d, r;
    DEVICE explicit Divisor(float by) : d(by), r(__fdiv_rn(1.0f, by)) {}
    DEVICE float divide(float x) const {
        float quotient = __fmul_rn(x, r);
        return __fmaf_rn(-__fmaf_rn(quotient, d, -x), r, quotient);
    }
};

DEVICE float scale_of(float amax, float largest) { return __fdiv_rn(amax < 1e-7f ? 1e-7f : amax, largest); }     // NaN stays NaN

// ---- Between warps.

DEVICE void tell(u32* counter) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
}
DEVICE void await(const u32* counter, u32 value) {
    if (threadIdx.x % 32 == 0) {
        for (;;) {
            u32 x;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
            if (x == value) break;
            __nanosleep(100);
        }
    }
    __syncwarp();
}
DEVICE float4 load_l2(const float* p) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
    return x;
}
DEVICE float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE void store_streaming(void* p, u32 lo, u32 hi) { asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(lo), "r"(hi) : "memory"); }
DEVICE void store_streaming(void* p, const u32 (&w)[4]) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// Which task of which head a drawn number is.
struct SageTaskAt {
    SageTask kind = SageTask::kNone;
    i32 head, at;               // at: block of 64 tokens, or running sum
    DEVICE SageTaskAt(const SageQuantizeParams& p, u32 drawn) {
        const u32 blocks_q = ceil_div(p.seq_len_q, 128) * 2, blocks_k = p.num_blocks, smooth = p.smooth_k ? 1 : 0;
        const u32 counts[] = {smooth * blocks_k, blocks_k, smooth * SageQuantizeConfig::kSumLanes, blocks_q, smooth, blocks_k, blocks_k};
        const u32 per_head = smooth * (blocks_k + SageQuantizeConfig::kSumLanes + 1) + blocks_q + 3 * blocks_k;
        head = drawn / per_head;
        if (head >= p.batch_heads) return;
        u32 t = drawn % per_head;
        #pragma unroll
        for (int i = 0; i < 7; i++) {
            if (kind != SageTask::kNone) continue;
            if (t < counts[i]) kind = SageTask(i);
            else t -= counts[i];
        }
        at = t;
    }
};

template <typename T, bool kVector>     // kVector: rows are contiguous and 16-byte aligned
struct SageQuantizer {
    using C = SageQuantizeConfig;
    using Row = RawRow<T>;
    const SageQuantizeParams& p;
    Row (*stage)[C::kColumns];                          // this warp's [64 tokens][16 columns]
    const int lane, column = lane % C::kColumns, half = lane / C::kColumns;

    DEVICE const Row& mine(int i) const { return stage[C::kRows * half + i][column]; }

    // Tokens past the last are zeros. What is read for the last time leaves L2 first.
    DEVICE void load(const void* base, const Strides4& strides, int head, int block, i32 tokens, bool last_use) const {
        const T* at = static_cast<const T*>(base) + head / p.heads * strides.b + head % p.heads * strides.h + i64(8 * column) * strides.d;
        __syncwarp();
        #pragma unroll 8
        for (int i = 0; i < C::kRows; i++) {            // the two halves of the warp at neighbouring tokens: 512 bytes a step
            const i32 row = 2 * i + half, token = block * C::kTokens + row;
            const bool exists = token < tokens;
            const T* source = at + (exists ? token : 0) * strides.s;
            if (kVector) stage[row][column].copy_async(source, exists, last_use);
            else stage[row][column].gather(source, strides.d, exists);
        }
        cp_async_commit();
    }
    DEVICE void arrived() const {
        cp_async_wait<0>();
        __syncwarp();
    }

    // Neighbour by neighbour.
    template <int kCount>
    DEVICE float sum_of(int first, int c) const {
        if constexpr (kCount == 1) return mine(first).at(c);
        else return sum_of<kCount / 2>(first, c) + sum_of<kCount / 2>(first + kCount / 2, c);
    }

    DEVICE void sum_k(int head, int block) {
        load(p.k, p.k_strides, head, block, p.seq_len_k, false);
        arrived();
        float s[8];
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            s[c] = sum_of<C::kRows>(0, c);
            s[c] += __shfl_xor_sync(~0u, s[c], C::kColumns);
        }
        float* out = p.block_sums + (i64(head) * p.num_blocks + block) * C::kDim + 8 * column;
        if (half == 0) {
            reinterpret_cast<float4*>(out)[0] = {s[0], s[1], s[2], s[3]};
            reinterpret_cast<float4*>(out)[1] = {s[4], s[5], s[6], s[7]};
        }
        tell(p.sums_done(head));
    }

    // Running sum n of 32: every 32nd block from block n on.
    DEVICE void sum_blocks(int head, int n) {
        await(p.sums_done(head), p.num_blocks);
        const float* sums = p.block_sums + i64(head) * p.num_blocks * C::kDim + 4 * lane;
        float4 sum{};
        #pragma unroll 16
        for (i64 block = n; block < p.num_blocks; block += C::kSumLanes) sum = sum + load_l2(sums + block * C::kDim);
        reinterpret_cast<float4*>(p.lane_sums + (i64(head) * C::kSumLanes + n) * C::kDim)[lane] = sum;
        tell(p.lanes_done(head));
    }

    template <int kCount>
    DEVICE float4 sum_of_lanes(const float* sums) const {
        if constexpr (kCount == 1) return load_l2(sums);
        else return sum_of_lanes<kCount / 2>(sums) + sum_of_lanes<kCount / 2>(sums + kCount / 2 * C::kDim);
    }

    DEVICE void finish_mean(int head) {
        await(p.lanes_done(head), C::kSumLanes);
        const float4 total = sum_of_lanes<C::kSumLanes>(p.lane_sums + i64(head) * C::kSumLanes * C::kDim + 4 * lane);
        const float tokens = p.seq_len_k;
        reinterpret_cast<float4*>(p.k_mean + i64(head) * C::kDim)[lane] = {__fdiv_rn(total.x, tokens), __fdiv_rn(total.y, tokens),
                                                                          __fdiv_rn(total.z, tokens), __fdiv_rn(total.w, tokens)};
        tell(p.mean_ready(head));
    }

    DEVICE Peak<T> peak_of(int first, int count) const {
        Peak<T> peak(mine(first));
        #pragma unroll 8
        for (int i = 1; i < count; i++) peak.add(mine(first + i));
        return peak;
    }

    // As integers magnitudes keep their order, with NaN on top.
    DEVICE static float largest_of_warp(float x) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x))); }

    DEVICE void scan_v(int head, int block) {
        load(p.v, p.v_strides, head, block, p.seq_len_k, false);
        arrived();
        const Peak<T> peak = peak_of(0, C::kRows);
        #pragma unroll
        for (int c = 0; c < 8; c++) {
            const u32 amax = __float_as_uint(peak.at(c)), both = max(amax, __shfl_xor_sync(~0u, amax, C::kColumns));
            if (half == c / 4) atomicMax(p.v_amax + i64(head) * C::kDim + 8 * column + c, both);
        }
        tell(p.scans_done(head));
    }

    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low byte.
    DEVICE static void store_int8(u8* out, const float (&x)[8], const Divisor& by) {
        u32 b[8];
        #pragma unroll
        for (int c = 0; c < 8; c++) b[c] = __float_as_uint(by.divide(x[c]) + 12582912.0f);
        store_streaming(out, __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410),
                        __byte_perm(__byte_perm(b[4], b[5], 0x0040), __byte_perm(b[6], b[7], 0x0040), 0x5410));
    }

    // Each half of the warp has its own 32 queries, and its own scale.
    DEVICE void convert_q(int head, int block) {
        load(p.q, p.q_strides, head, block, p.seq_len_q, true);
        arrived();
        const Peak<T> peak = peak_of(0, C::kRows);
        float amax = peak.at(0);
        #pragma unroll
        for (int c = 1; c < 8; c++) amax = max_or_nan(amax, peak.at(c));
        #pragma unroll
        for (int step = 1; step < C::kColumns; step *= 2) amax = max_or_nan(amax, __shfl_xor_sync(~0u, amax, step));
        const float scale = scale_of(amax, 127.0f);
        if (column == 0) p.q_scale[i64(head) * (ceil_div(p.seq_len_q, 128) * 4) + 2 * block + half] = scale;
        const Divisor by(scale);
        const i32 first = block * C::kTokens + C::kRows * half;
        u8* out = p.q_int8 + (i64(head) * p.seq_len_q + first) * C::kDim + 8 * column;
        #pragma unroll 4
        for (int i = 0; i < C::kRows; i++) {
            float y[8];
            #pragma unroll
            for (int c = 0; c < 8; c++) y[c] = mine(i).at(c);
            if (first + i < p.seq_len_q) store_int8(out + i * C::kDim, y, by);
        }
    }

    DEVICE void convert_k(int head, int block) {
        load(p.k, p.k_strides, head, block, p.seq_len_k, true);
        float mean[8] = {};
        if (p.smooth_k) {
            await(p.mean_ready(head), 1);
            const float4 a = load_l2(p.k_mean + i64(head) * C::kDim + 8 * column), b = load_l2(p.k_mean + i64(head) * C::kDim + 8 * column + 4);
            mean[0] = a.x, mean[1] = a.y, mean[2] = a.z, mean[3] = a.w, mean[4] = b.x, mean[5] = b.y, mean[6] = b.z, mean[7] = b.w;
        }
        arrived();
        const i32 first = block * C::kTokens + C::kRows * half;
        float amax = 0.0f;
        #pragma unroll 4
        for (int i = 0; i < C::kRows; i++) {
            float most = 0.0f;
            #pragma unroll
            for (int c = 0; c < 8; c++) most = max_or_nan(most, fabsf(mine(i).at(c) - mean[c]));
            if (first + i < p.seq_len_k) amax = max_or_nan(amax, most);
        }
        const float scale = scale_of(largest_of_warp(amax), 127.0f);
        if (lane == 0) p.k_scale[i64(head) * p.num_blocks + block] = scale;
        const Divisor by(scale);
        u8* out = p.k_int8 + (i64(head) * p.seq_len_k + first) * C::kDim + 8 * column;
        #pragma unroll 4
        for (int i = 0; i < C::kRows; i++) {
            float y[8];
            #pragma unroll
            for (int c = 0; c < 8; c++) y[c] = mine(i).at(c) - mean[c];
            if (first + i < p.seq_len_k) store_int8(out + i * C::kDim, y, by);
        }
    }

    // Two channels of four tokens of the stage, divided and packed.
    DEVICE void quarter(u32 (&bytes)[2], int pair, int token, const Divisor (&by)[2]) const {
        float x[2][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) stage[token + i][pair / 4].two_at(pair % 4, x[0][i], x[1][i]);
        #pragma unroll
        for (int c = 0; c < 2; c++)
            bytes[c] = pack_e4m3x4(by[c].divide(x[c][0]), by[c].divide(x[c][1]), by[c].divide(x[c][2]), by[c].divide(x[c][3]));
    }

    // A lane has two neighbouring channels of all 64 tokens, twice.
    DEVICE void convert_v(int head, int block) {
        load(p.v, p.v_strides, head, block, p.seq_len_k, true);
        await(p.scans_done(head), p.num_blocks);
        arrived();
        const i64 padded = i64(p.num_blocks) * C::kTokens;
        #pragma unroll 1
        for (int pair = lane; pair < C::kDim / 2; pair += 32) {
            float2 amax;
            asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(amax.x), "=f"(amax.y) : "l"(p.v_amax + i64(head) * C::kDim + 2 * pair) : "memory");
            const Divisor by[2] = {Divisor(scale_of(amax.x, 448.0f)), Divisor(scale_of(amax.y, 448.0f))};
            if (block == 0) reinterpret_cast<float2*>(p.v_scale + i64(head) * C::kDim)[pair] = {by[0].d, by[1].d};
            u8* out = p.v_fp8 + (i64(head) * C::kDim + 2 * pair) * padded + i64(block) * C::kTokens;
            #pragma unroll 1
            for (int group = 0; group < C::kTokens; group += 16) {
                u32 bytes[4][2];
                #pragma unroll
                for (int i = 0; i < 4; i++) quarter(bytes[i], pair, group + 4 * i, by);
                #pragma unroll
                for (int c = 0; c < 2; c++) {
                    const u32 natural[4] = {bytes[0][c], bytes[1][c], bytes[2][c], bytes[3][c]};
                    const u32 mixed[4] = {__byte_perm(bytes[0][c], bytes[2][c], 0x5410), __byte_perm(bytes[0][c], bytes[2][c], 0x7632),
                                          __byte_perm(bytes[1][c], bytes[3][c], 0x5410), __byte_perm(bytes[1][c], bytes[3][c], 0x7632)};
                    if (p.interleaved) store_streaming(out + c * padded + group, mixed);
                    else store_streaming(out + c * padded + group, natural);
                }
            }
        }
    }

    DEVICE void work(const SageTaskAt& task) {
        switch (task.kind) {
            case SageTask::kSumK: return sum_k(task.head, task.at);
            case SageTask::kScanV: return scan_v(task.head, task.at);
            case SageTask::kSumBlocks: return sum_blocks(task.head, task.at);
            case SageTask::kConvertQ: return convert_q(task.head, task.at);
            case SageTask::kFinishMean: return finish_mean(task.head);
            case SageTask::kConvertV: return convert_v(task.head, task.at);
            case SageTask::kConvertK: return convert_k(task.head, task.at);
            case SageTask::kNone: return;
        }
    }
};

template <typename T, bool kVector>
DEVICE void sage_quantize(const SageQuantizeParams& p) {
    using C = SageQuantizeConfig;
    extern __shared__ __align__(128) u8 raw_shared[];
    auto* stages = reinterpret_cast<RawRow<T>(*)[C::kTokens][C::kColumns]>(raw_shared);
    const int lane = threadIdx.x % 32;
    u32 next = lane == 0 ? atomicAdd(p.progress, 1) : 0;
    for (;;) {
        const SageTaskAt task(p, __shfl_sync(~0u, next, 0));
        if (task.kind == SageTask::kNone) return;
        if (lane == 0) next = atomicAdd(p.progress, 1);         // its latency passes under the task
        SageQuantizer<T, kVector>{p, stages[threadIdx.x / 32], lane}.work(task);
    }
}
