// Paged block-sparse attention on tensor cores of SM80 and later (mma.sync, ldmatrix, cp.async).
//
// A CTA has one tile of query rows (tokens x heads that share a block list) and walks its share of the
// list in tiles of kKeys keys, kStages of them in shared memory. For long rows of queries the warps lie
// side by side over the rows; for short ones (decode) they share out every key tile instead, each with
// a softmax of its own, and meet in the epilogue: then the kernel is a bandwidth-bound reader.
#pragma once
#include "common/launch_chain.cuh"
#include "common/paged_params.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "portable/cta_state.cuh"
#include "portable/key_gather.cuh"
#include "portable/non_finite.cuh"
#include "portable/paged_config.cuh"
#include "portable/paged_epilogue.cuh"
#include "portable/query_tile.cuh"

template <typename C>
class WarpAttention {
public:
    float acc[C::kFragments][C::kD / 8][4] = {};
    OnlineSoftmax softmax[C::kFragments];

    explicit DEVICE WarpAttention(const PagedParams& p) : p_(p) {
        const int lane = threadIdx.x % 32, first_key = key_warp() * C::kWarpKeys;
        const u32 base = smem_address(shared_memory);
        q_ = base + C::kQ + swizzled<C>(first_row() + lane % 16, lane / 16);
        k_ = base + C::kK + swizzled<C>(first_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v_ = base + C::kV + swizzled<C>(first_key + lane % 16, lane / 16);
    }

    // Waits for the warps that load and read the same keys as this one.
    DEVICE void sync_keys() const {
        if constexpr (C::kRowWarps == 1) __syncwarp();
        else if constexpr (C::kKeyWarps == 1) __syncthreads();
        else named_barrier(1 + key_warp(), 32 * C::kRowWarps);
    }

    DEVICE void attend(int stage) {
        const int2 span = token_span(stage);
        if (span.x > state<C>().highest_limit) return;
        const bool whole = span.y <= state<C>().lowest_limit;
        float s[C::kFragments][C::kWarpKeys / 8][4];
        score(stage, s);
        if (!whole) mask(stage, s);
        rescale(s);
        // Where some of these queries see keys that others do not, 0 x NaN would reach the others.
        if (C::kCausal && !whole && NonFinite<C>::any(stage, key_warp())) NonFinite<C>::take_out(stage, key_warp());
        accumulate(stage, s);
    }

private:
    const PagedParams& p_;
    u32 q_, k_, v_;             // this lane's ldmatrix addresses: fragment 0, stage 0

    static DEVICE int key_warp() { return threadIdx.x / 32 / C::kRowWarps; }
    static DEVICE int first_row() { return threadIdx.x / 32 % C::kRowWarps * C::kFragments * 16; }

    // The last keys that this lane's rows see: rows 8 apart, two to a fragment.
    DEVICE void row_limits(int (&limits)[2 * C::kFragments]) const {
#pragma unroll
        for (int i = 0; i < 2 * C::kFragments; ++i) limits[i] = row_limit<C>(first_row() + 8 * i + threadIdx.x % 32 / 4);
    }

    DEVICE const int* tokens(int stage) const {
        return reinterpret_cast<const int*>(shared_memory + C::kTokens) + stage * C::kKeys + key_warp() * C::kWarpKeys;
    }

    // The lowest and highest token among the keys of this warp's group.
    DEVICE int2 token_span(int stage) const {
        const int2* spans = reinterpret_cast<const int2*>(shared_memory + C::kSpans) + stage * C::kWarps + key_warp() * C::kRowWarps;
        int2 span = spans[0];
#pragma unroll
        for (int w = 1; w < C::kRowWarps; ++w) span = make_int2(min(span.x, spans[w].x), max(span.y, spans[w].y));
        return span;
    }

    DEVICE void score(int stage, float (&s)[C::kFragments][C::kWarpKeys / 8][4]) const {
        const u32 k_tile = k_ + stage * C::kTileBytes;
#pragma unroll
        for (int f = 0; f < C::kFragments; ++f)
#pragma unroll
            for (int n = 0; n < C::kWarpKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[f][n][i] = 0.f;
#pragma unroll
        for (int d = 0; d < C::kD / 16; ++d) {
            u32 a[C::kFragments][4];
#pragma unroll
            for (int f = 0; f < C::kFragments; ++f) ldmatrix_x4(a[f], (q_ ^ (d << 5)) + f * 16 * C::kRowBytes);
#pragma unroll
            for (int n = 0; n < C::kWarpKeys / 16; ++n) {
                u32 b[4];
                ldmatrix_x4(b, (k_tile ^ (d << 5)) + n * 16 * C::kRowBytes);
#pragma unroll
                for (int f = 0; f < C::kFragments; ++f) {
                    mma_16x8x16<typename C::T>(s[f][2 * n], a[f], b[0], b[1]);
                    mma_16x8x16<typename C::T>(s[f][2 * n + 1], a[f], b[2], b[3]);
                }
            }
        }
    }

    DEVICE void mask(int stage, float (&s)[C::kFragments][C::kWarpKeys / 8][4]) const {
        int limits[2 * C::kFragments];
        row_limits(limits);
        const int2* pairs = reinterpret_cast<const int2*>(tokens(stage)) + threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < C::kWarpKeys / 8; ++n) {
            const int2 token = pairs[4 * n];
#pragma unroll
            for (int f = 0; f < C::kFragments; ++f)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if ((i % 2 ? token.y : token.x) > limits[2 * f + i / 2]) s[f][n][i] = NEG_INF;
        }
    }

    // Brings what was accumulated before to the maxima of these scores, where they are much higher.
    DEVICE void rescale(const float (&s)[C::kFragments][C::kWarpKeys / 8][4]) {
        bool outgrown = false;
#pragma unroll
        for (int f = 0; f < C::kFragments; ++f) outgrown |= softmax[f].outgrown(s[f], p_.scale_log2);
        if (!__any_sync(~0u, outgrown)) return;
#pragma unroll
        for (int f = 0; f < C::kFragments; ++f) {
            float factor[2];
            softmax[f].raise(s[f], p_.scale_log2, factor);
#pragma unroll
            for (int n = 0; n < C::kD / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[f][n][i] *= factor[i / 2];
        }
    }

    // Scores of keys 16 k and following to probabilities, as the left operand of a product.
    DEVICE void probabilities(u32 (&a)[4], OnlineSoftmax& softmax, float (&s)[C::kWarpKeys / 8][4], int k) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float (&column)[4] = s[2 * k + j];
            softmax.exponentiate(column, p_.scale_log2);
            a[2 * j] = pack2<typename C::T>(column[0], column[1]);
            a[2 * j + 1] = pack2<typename C::T>(column[2], column[3]);
        }
    }

    // Scores to probabilities P, and acc += P.V.
    DEVICE void accumulate(int stage, float (&s)[C::kFragments][C::kWarpKeys / 8][4]) {
        const u32 v_tile = v_ + stage * C::kTileBytes;
#pragma unroll
        for (int k = 0; k < C::kWarpKeys / 16; ++k) {
            u32 a[C::kFragments][4];
#pragma unroll
            for (int f = 0; f < C::kFragments; ++f) probabilities(a[f], softmax[f], s[f], k);
#pragma unroll
            for (int d = 0; d < C::kD / 16; ++d) {
                u32 b[4];
                ldmatrix_x4_trans(b, (v_tile ^ (d << 5)) + k * 16 * C::kRowBytes);
#pragma unroll
                for (int f = 0; f < C::kFragments; ++f) {
                    mma_16x8x16<typename C::T>(acc[f][2 * d], a[f], b[0], b[1]);
                    mma_16x8x16<typename C::T>(acc[f][2 * d + 1], a[f], b[2], b[3]);
                }
            }
        }
    }
};

// Keeps kStages - 1 key tiles requested ahead of the one at hand.
template <typename C>
class KeyPipeline {
public:
    explicit DEVICE KeyPipeline(const PagedParams& p) : keys_(p) {
        for (int i = 0; i < C::kStages - 1; ++i) keys_.load(state<C>().first_tile + i, i);
    }

    // `tile` is there, in `stage`, and nobody reads the one before any more.
    DEVICE void advance(int tile, int stage) { keys_.load(tile + C::kStages - 1, stage == 0 ? C::kStages - 1 : stage - 1); }

private:
    KeyGather<C> keys_;
};

// One tile of query rows over its key tiles. All threads of the CTA.
template <typename C, typename Pipeline = KeyPipeline<C>>
DEVICE void attend_tile(const PagedParams& p, const CtaState& cta) {
    if (cta.first_tile == cta.end_tile) return store_nothing<C>(p, cta.tile, cta.row.bad);
    if (threadIdx.x == 0) {
        state<C>() = cta;
        set_gather_state<C>(cta);
    }
    if constexpr (C::kCausal) {
        set_row_limits<C>(p, cta);
        NonFinite<C>::clear();
    }
    __syncthreads();
    state<C>().tile.template load<C>(p);
    Pipeline keys(p);
    WarpAttention<C> warp(p);
    cp_async_wait<C::kStages - 1>();
    __syncthreads();                        // every warp's part of Q is there

    int stage = 0;
    for (int tile = state<C>().first_tile; tile < state<C>().end_tile; ++tile) {
        cp_async_wait<C::kStages - 2>();
        warp.sync_keys();                   // this tile is there, and nobody reads the one before any more
        keys.advance(tile, stage);
        warp.attend(stage);
        stage = stage == C::kStages - 1 ? 0 : stage + 1;
    }
    if constexpr (!C::kTailOnly) let_next_launch_start();       // at the start, its waiting CTAs cost as much as they save
    __syncthreads();
    if (state<C>().row.bad) return store_nothing<C>(p, state<C>().tile, true);
    share_accumulators<C>(warp.acc, warp.softmax);
    store_rows<C>(p, state<C>().tile);
}

template <typename C>
DEVICE void attend_tile(const PagedParams& p, int x, int split) {
    const QueryTile tile = QueryTile::of<C>(p, x, split);
    if (tile.count <= 0) return;
    CtaState cta = CtaState::of<C>(p, tile);
    cta.keep_split(p);
    attend_tile<C>(p, cta);
}

template <typename C>
DEVICE void paged_attention(const PagedParams& p) { attend_tile<C>(p, blockIdx.x, blockIdx.y); }
