// The end of a row: normalized output and lse, straight from the accumulators or merged over a cluster.
#pragma once
#include "sm90/lazy_softmax.cuh"
#include "sm90/paged_plan.cuh"

// 4 x 4 registers across the four lanes of a quad, transposed: lane i ends up with register i of all four.
DEVICE void transpose_quad(u32 (&x)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = other;
    }
}

template <typename Plan>
struct RowStore {
    const PagedParams& p;
    const WorkItem& w;

    DEVICE typename Plan::Element* out(int row) const {
        return static_cast<typename Plan::Element*>(p.out) + w.b * p.out_stride_b + w.token(p, row) * p.out_stride_t + w.head(p, row) * p.out_stride_h;
    }
    // Without a visible key: -inf.
    DEVICE void lse(int row, float top, float sum) const {
        if (p.lse == nullptr) return;
        p.lse[(i64(w.b) * p.num_kv_heads * p.group + w.head(p, row)) * p.seq_len_q + w.token(p, row)] =
            sum == 0.f ? NEG_INF : (top + log2_approx(sum)) * kLn2;
    }
};

// `row`: of the block, the first of this thread's two. A bad row is stored as zeros, its lse as -inf.
template <typename Plan>
DEVICE void store_rows(const PagedParams& p, const WorkItem& w, float (&o)[Plan::kChunks][Plan::kChunk / 8][4], LazySoftmax& softmax,
                       bool bad, int row, int lane) {
    using T = typename Plan::Element;
    const RowStore<Plan> store{p, w};
    // Lane i finds where row i of the warp's sixteen lies: divisions by the group are long.
    const int mine = row - lane / 4 + lane % 16;
    const u64 place = mine < w.count ? u64(store.out(mine)) : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        const float sum = bad ? 0.f : quad_sum(softmax.sum[half]);
        const float inverse = 1.f / sum;
        const bool live = row < w.count;
        const u64 out = __shfl_sync(~0u, place, lane / 4 + 8 * half) + 16 * (lane % 4);
        if (live && lane % 4 == 0) store.lse(row, softmax.top[half], sum);
#pragma unroll
        for (int c = 0; c < Plan::kHeadDim / 32; ++c) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = 4 * c + i;
                const float (&x)[4] = o[j * 8 / Plan::kChunk][j % (Plan::kChunk / 8)];
                packed[i] = sum == 0.f ? 0 : pack2<T>(x[2 * half] * inverse, x[2 * half + 1] * inverse);
            }
            transpose_quad(packed, lane);
            if (live) store_global16(out + 64 * c, packed);
        }
    }
}

// Leaves this block's share where its cluster can read it. Called by the consumer warpgroup alone.
template <typename Plan>
DEVICE void publish_partial(PartialResult<Plan>& partial, const WorkItem& w, float (&o)[Plan::kChunks][Plan::kChunk / 8][4],
                            LazySoftmax& softmax, bool bad, int row, int lane) {
    if (row == 0 && lane == 0) partial.bad = bad;
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        const float sum = quad_sum(softmax.sum[half]);
        if (row >= w.count) continue;
        if (lane % 4 == 0) partial.top[row] = softmax.top[half], partial.sum[row] = sum;
#pragma unroll
        for (int j = 0; j < Plan::kHeadDim / 8; ++j) {
            const float (&x)[4] = o[j * 8 / Plan::kChunk][j % (Plan::kChunk / 8)];
            *reinterpret_cast<float2*>(&partial.out[row][8 * j + 2 * (lane % 4)]) = make_float2(x[2 * half], x[2 * half + 1]);
        }
    }
}

// Eight columns of one row per thread and step, dealt over the blocks of the cluster.
template <typename Plan>
DEVICE void merge_cluster(const PagedParams& p, const WorkItem& w, const PartialResult<Plan>& partial, int rank, int thread) {
    constexpr int kPieces = Plan::kHeadDim / 8;
    const RowStore<Plan> store{p, w};
    bool bad = false;
#pragma unroll
    for (int s = 0; s < Plan::kSplits; ++s) bad |= load_peer(peer_address(&partial.bad, s)) != 0.f;
    for (int i = rank * 128 + thread; i < w.count * kPieces; i += Plan::kSplits * 128) {
        const int row = i / kPieces, piece = i % kPieces;
        float tops[Plan::kSplits], top = NEG_INF;
#pragma unroll
        for (int s = 0; s < Plan::kSplits; ++s) top = fmaxf(top, tops[s] = load_peer(peer_address(&partial.top[row], s)));
        float sum = 0.f, acc[8] = {};
#pragma unroll
        for (int s = 0; s < Plan::kSplits; ++s) {
            const float weight = tops[s] == NEG_INF ? 0.f : exp2_approx(tops[s] - top);
            const u32 from = peer_address(&partial.out[row][8 * piece], s);
            const float4 x = load_peer4(from), y = load_peer4(from + 16);
            sum += weight * load_peer(peer_address(&partial.sum[row], s));
            acc[0] += weight * x.x, acc[1] += weight * x.y, acc[2] += weight * x.z, acc[3] += weight * x.w;
            acc[4] += weight * y.x, acc[5] += weight * y.y, acc[6] += weight * y.z, acc[7] += weight * y.w;
        }
        if (bad) sum = 0.f;
        const float inverse = 1.f / sum;
        u32 packed[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) packed[k] = sum == 0.f ? 0 : pack2<typename Plan::Element>(acc[2 * k] * inverse, acc[2 * k + 1] * inverse);
        *reinterpret_cast<uint4*>(store.out(row) + 8 * piece) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        if (piece == 0) store.lse(row, top, sum);
    }
}
