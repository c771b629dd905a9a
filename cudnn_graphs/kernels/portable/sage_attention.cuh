// Sage block-sparse attention on mma.sync: one CTA of four warps per 64 query rows, 16 rows a warp, one key
// block at a time, the next one's K and V on their way by cp.async.
#pragma once
#include "common/sage_rows.cuh"
#include "common/sage_tile.cuh"
#include "portable/sage_mma.cuh"
#include "portable/sage_softmax.cuh"

struct SageConfig {
    static constexpr int kThreads = 128;
    static constexpr int kStages = 2;
    static constexpr int kTileBytes = kSageBlock * kSageDim;            // of K [64][128] and of V [128][64] alike
    static constexpr int kK = 0;                                        // [stage]; 16-byte units at unit ^ (row % 8)
    static constexpr int kV = kStages * kTileBytes;                     // [stage]; units at unit ^ (row / 2 % 4)
    static constexpr int kSmemBytes = 2 * kStages * kTileBytes;
};

template <bool kInterleaved>
struct SageAttention {
    using C = SageConfig;
    const SageParams& p;
    const SageItem item;
    u8* shared;
    const int tid = threadIdx.x, lane = tid % 32;
    const SageRows rows{p, item, tid / 32};
    u32 q[4][4];                                        // A operands of 32 channels each
    float o[kSageDim / 8][4] = {};
    SageSoftmax softmax{};

    DEVICE SageAttention(const SageParams& params, u8* smem) : p(params), item(params, blockIdx.x), shared(smem) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                q[step][i] = !rows.live[i % 2] ? 0 : *reinterpret_cast<const u32*>(p.q + rows.token(i % 2) * kSageDim + 32 * step + i / 2 * 16 + lane % 4 * 4);
    }

    // K rows land in column order; those past the last token become zeros. V's padding is inside its tensor.
    DEVICE void load(const SageBlock& block, int stage) const {
        const int tid = recomputed(this->tid);
        const i64 first = i64(block.id) * kSageBlock, padded = i64(p.num_blocks) * kSageBlock;
        const u8* k = p.k + i64(item.head) * p.seq_len_k * kSageDim;
        const u8* v = p.v + i64(item.head) * kSageDim * padded + first;
        const u32 to_k = smem_address(shared + C::kK + stage * C::kTileBytes), to_v = smem_address(shared + C::kV + stage * C::kTileBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tid / 8 + 16 * i, unit = tid % 8;
            const i64 token = first + SageTile<kInterleaved>::token(row);
            const bool exists = token < p.seq_len_k;
            cp_async16(to_k + row * 128 + (unit ^ (row & 7)) * 16, k + (exists ? token : 0) * kSageDim + unit * 16, exists);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tid / 4 + 32 * i, unit = tid % 4;
            cp_async16(to_v + row * 64 + (unit ^ (row / 2 & 3)) * 16, v + row * padded + unit * 16, true);
        }
    }

    DEVICE void score(float (&s)[8][4], int stage) const {
        const u32 k = smem_address(shared + C::kK + stage * C::kTileBytes);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            i32 c[4] = {i32(kScoreBits), i32(kScoreBits), i32(kScoreBits), i32(kScoreBits)};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                u32 b[4];
                ldmatrix_x4(b, k + (lane & 7) * 128 + ((lane >> 3 | 4 * pair) ^ (lane & 7)) * 16 + 1024 * t);
                mma_16x8x32_s8(c, q[2 * pair], b[0], b[1]);
                mma_16x8x32_s8(c, q[2 * pair + 1], b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) s[t][i] = __int_as_float(c[i]);
        }
    }

    DEVICE void mask(float (&s)[8][4], int valid) const {
        const int lane = recomputed(this->lane);
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (SageTile<kInterleaved>::token(8 * t + lane % 4 * 2 + i % 2) >= valid) s[t][i] = NEG_INF;
    }

    // O = O * rescale + P.V, the product of 64 keys summed apart: FP8 tensor cores keep few bits along a chain.
    DEVICE void accumulate(const float (&s)[8][4], const float (&rescale)[2], int stage) {
        const u32 v = smem_address(shared + C::kV + stage * C::kTileBytes);
#if FP8_PRODUCTS
        u32 a[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = 4 * step + i / 2 * 2, c = i % 2 * 2;
                a[step][i] = pack_e4m3x4(s[t][c], s[t][c + 1], s[t + 1][c], s[t + 1][c + 1]);
            }
#else
        u32 a[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[step][i] = pack2<fp16>(s[2 * step + i / 2][i % 2 * 2], s[2 * step + i / 2][i % 2 * 2 + 1]);
#endif
#pragma unroll
        for (int n = 0; n < kSageDim / 8; ++n) {
            if (n % 4 == 0) named_barrier(1 + tid / 32, 32);    // of this warp: all loads at once would spill
            u32 b[4];
            ldmatrix_x4(b, v + (lane & 7) * 64 + (lane >> 3 ^ (lane >> 1 & 3)) * 16 + 512 * n);
            float c[4] = {};
#if FP8_PRODUCTS
            mma_16x8x32_e4m3(c, a[0], b[0], b[1]);
            mma_16x8x32_e4m3(c, a[1], b[2], b[3]);
#else
#pragma unroll
            for (int step = 0; step < 4; ++step) {      // the same four slots a lane, as two fp16 pairs
                u32 lo, hi;
                unpack_e4m3x4(b[step], lo, hi);
                mma_16x8x16<fp16>(c, a[step], lo, hi);
            }
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i) o[n][i] = fmaf(o[n][i], rescale[i / 2], c[i]);
        }
    }

    DEVICE void attend(const SageBlock& block, int stage) {
        float s[8][4], rescale[2];
        score(s, stage);
        if (block.valid < kSageBlock) {
            mask(s, block.valid);
            clear_invisible<kInterleaved>(shared + C::kV + stage * C::kTileBytes, recomputed(tid), block.valid);
            __syncthreads();
        }
        const float scale[1] = {rows.score_scale() * block.scale};
        softmax.step<1>(s, scale, rescale);
        accumulate(s, rescale, stage);
    }

    DEVICE void run() {
        SageBlockReader reader(p, item);
        SageBlock next = reader.next();
        if (next.valid > 0) load(next, 0);
        cp_async_commit();
        for (int stage = 0; next.valid > 0; stage ^= 1) {
            const SageBlock block = next;
            next = reader.next();
            if (next.valid > 0) load(next, stage ^ 1);
            cp_async_commit();
            cp_async_wait<1>();
            __syncthreads();
            attend(block, stage);
            __syncthreads();
        }
        rows.store(o, softmax, FP8_PRODUCTS ? 1.0f : 256.0f, p.v_scale + i64(item.head) * kSageDim);      // in fp16 products V was 2^-8 of itself
    }
};
