// From accumulators to memory: the shares of the key warps are brought to one maximum and added through
// shared memory, and each thread then writes 8 channels of a row at a time.
#pragma once
#include "common/paged_params.cuh"
#include "common/softmax.cuh"
#include "portable/cta_state.cuh"
#include "portable/non_finite.cuh"
#include "portable/paged_config.cuh"
#include "portable/query_tile.cuh"

// Where row m of a tile is written: the output, or this split's partial result (see merge_splits.cuh).
template <typename C>
struct OutputRow {
    bool partial;
    i64 item;                   // (b, token, head) of a partial result, its split included
    i64 out_at, lse_at;

    DEVICE OutputRow(const PagedParams& p, const QueryTile& tile, int m) : partial(C::kTailOnly || p.num_splits > 1) {
        const int heads = p.num_kv_heads * p.group, t = tile.token(p, m), head = tile.head(p, m);
        item = ((i64(tile.split) * p.batch + tile.b) * p.seq_len_q + t) * heads + head;
        out_at = tile.b * p.out_stride_b + t * p.out_stride_t + head * p.out_stride_h;
        lse_at = (i64(tile.b) * heads + head) * p.seq_len_q + t;
    }

    DEVICE void write_lse(const PagedParams& p, float lse) const {
        if (partial) p.partial_lse[item] = lse;
        else if (p.lse != nullptr) p.lse[lse_at] = lse;
    }

    DEVICE void write_out(const PagedParams& p, int channel, const float (&x)[8]) const {
        if (partial) {
            float4* to = reinterpret_cast<float4*>(p.partial_out + item * C::kD + channel);
            to[0] = make_float4(x[0], x[1], x[2], x[3]);
            to[1] = make_float4(x[4], x[5], x[6], x[7]);
        } else {
            using T = typename C::T;
            *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + out_at + channel) =
                make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
        }
    }
};

// The result of rows that see nothing: zeros and lse -inf. A bad row's partial says so by +inf.
template <typename C>
DEVICE void store_nothing(const PagedParams& p, const QueryTile& tile, bool bad) {
    for (int m = threadIdx.x; m < tile.count; m += C::kThreads) {
        const OutputRow<C> row(p, tile, m);
        row.write_lse(p, bad && row.partial ? -NEG_INF : NEG_INF);
    }
    if (C::kTailOnly || p.num_splits > 1) return;
    const float zeros[8] = {};
    for (int i = threadIdx.x; i < tile.count * C::kChunks; i += C::kThreads)
        OutputRow<C>(p, tile, i / C::kChunks).write_out(p, i % C::kChunks * 8, zeros);
}

// The key warps' shares in shared memory.
template <typename C>
struct Exchange {
    static DEVICE float* tops() { return reinterpret_cast<float*>(shared_memory + C::kTops); }    // [key warp][row]
    static DEVICE float* sums() { return reinterpret_cast<float*>(shared_memory + C::kSums); }

    // Channels 8 * group and following of [key warp][row][D]; the groups are swizzled by row.
    static DEVICE float* channels(int key_warp, int row, int group) {
        return reinterpret_cast<float*>(shared_memory + C::kExchange) + (key_warp * C::kRows + row) * C::kD + (group ^ (row & 7)) * 8;
    }

    // What multiplies the share of a key warp: 0 for one that saw nothing of the row.
    static DEVICE float weight(int key_warp, int row, float top) {
        const float own = tops()[key_warp * C::kRows + row];
        return own == NEG_INF ? 0.f : exp2_approx(own - top);
    }
    static DEVICE float top(int row) {
        float most = tops()[row];
        for (int w = 1; w < C::kKeyWarps; ++w) most = fmaxf(most, tops()[w * C::kRows + row]);
        return most;
    }
};

// Puts this warp's accumulators where `store_rows` finds them. All threads of the CTA.
template <typename C>
DEVICE void share_accumulators(float (&acc)[C::kFragments][C::kD / 8][4], OnlineSoftmax (&softmax)[C::kFragments]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int key_warp = warp / C::kRowWarps, first = warp % C::kRowWarps * C::kFragments * 16 + lane / 4;
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(softmax[f].sum[half]);
            const int at = key_warp * C::kRows + first + 16 * f + 8 * half;
            if (lane % 4 == 0) Exchange<C>::tops()[at] = softmax[f].top[half], Exchange<C>::sums()[at] = sum;
        }
    __syncthreads();            // also: nobody reads a tile any more
#pragma unroll
    for (int f = 0; f < C::kFragments; ++f)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first + 16 * f + 8 * half;
            const float weight = C::kKeyWarps == 1 ? 1.f : Exchange<C>::weight(key_warp, row, Exchange<C>::top(row));
#pragma unroll
            for (int n = 0; n < C::kD / 8; ++n) {
                float2* to = reinterpret_cast<float2*>(Exchange<C>::channels(key_warp, row, n) + lane % 4 * 2);
                *to = make_float2(acc[f][n][2 * half] * weight, acc[f][n][2 * half + 1] * weight);
            }
        }
    __syncthreads();
}

template <typename C>
DEVICE void add_non_finite(int m, int channel, float (&x)[8]) {
    const int limit = row_limit<C>(m);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] += NonFinite<C>::seen(channel + c, limit);
}

template <typename C>
DEVICE void store_rows(const PagedParams& p, const QueryTile& tile) {
    for (int i = threadIdx.x; i < tile.count * C::kChunks; i += C::kThreads) {
        const int m = i / C::kChunks, group = i % C::kChunks;
        const float top = Exchange<C>::top(m);
        float sum = 0.f, x[8] = {};
#pragma unroll
        for (int w = 0; w < C::kKeyWarps; ++w) {
            sum += Exchange<C>::sums()[w * C::kRows + m] * Exchange<C>::weight(w, m, top);
            const float4* from = reinterpret_cast<const float4*>(Exchange<C>::channels(w, m, group));
            const float4 lo = from[0], hi = from[1];
            x[0] += lo.x, x[1] += lo.y, x[2] += lo.z, x[3] += lo.w;
            x[4] += hi.x, x[5] += hi.y, x[6] += hi.z, x[7] += hi.w;
        }
        const OutputRow<C> row(p, tile, m);
        const bool nothing = sum == 0.f;
        const float inverse = nothing ? 0.f : 1.f / sum;
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] *= inverse;
        if constexpr (C::kCausal) add_non_finite<C>(m, group * 8, x);
        if (!(row.partial && nothing)) row.write_out(p, group * 8, x);
        if (group == 0) row.write_lse(p, nothing ? NEG_INF : (top + log2_approx(sum)) * kLn2);
    }
}
