// What partial tiles need beyond full ones: score masks, and values that are kept out of queries that do not
// see them, whatever bytes they hold (a probability of 0 times NaN is NaN).
//
// A key is dead when no query of the block sees it: its values are zeroed in shared memory. Under the causal
// mask a key may be seen by some queries only; if such a key holds a value that is not finite, the product is
// done element by element, skipping what is not seen.
#pragma once
#include "sm90/paged_plan.cuh"
#include "sm90/wgmma.cuh"

// Which tokens the queries of one item see.
template <typename Plan>
struct Sight {
    const u32* valid_bits;      // of this request
    u32 length;
    int first, last;            // last token that the block's first and last query see
    int mine[2];                // and this thread's two rows

    DEVICE Sight(const PagedParams& p, const RowNotes& notes, int row) : length(notes.length), first(notes.sees_first), last(notes.sees_last) {
        if constexpr (Plan::kBits) valid_bits = p.valid_bits + notes.item.b * p.valid_bits_stride;
        if constexpr (Plan::kCausal)
            for (int half = 0; half < 2; ++half) mine[half] = notes.length - p.seq_len_q + notes.item.token(p, row + 8 * half);
    }
    // Valid bits of 8 tokens that start at a multiple of 8; 0 past the length.
    DEVICE u32 valid8(u32 token) const {
        if (token >= length) return 0;
        const u32 inside = length - token >= 8 ? 0xff : (1u << (length - token)) - 1;
        if constexpr (Plan::kBits) return valid_bits[token / 32] >> token % 32 & inside;
        return inside;
    }
    DEVICE bool dead(u32 token) const {
        return !(valid8(token & ~7u) >> token % 8 & 1) || (Plan::kCausal && int(token) > last);
    }
};

// Token of a tile's key.
template <typename Plan>
DEVICE u32 token_of(const TileNotes<Plan::kBoxes>& notes, int key) { return notes.token[key / Plan::kBox] + key % Plan::kBox; }

// What one thread sees of a tile: bit 2 j + e of a row stands for column 8 j + 2 (lane % 4) + e.
template <typename Plan>
DEVICE void seen_columns(u32 (&seen)[2], const TileNotes<Plan::kBoxes>& notes, const Sight<Plan>& sight, int lane) {
    seen[0] = seen[1] = 0;
    if constexpr (!Plan::kBits) {                       // of every box a row sees the first keys, up to some
#pragma unroll 1
        for (int i = 0; i < Plan::kBoxes; ++i) {
            const u32 token = notes.token[i];
            const int live = token == kNoToken ? 0 : int(min(sight.length - token, u32(Plan::kBox)));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int keys = Plan::kCausal ? max(min(live, int(u32(sight.mine[half]) - token + 1)), 0) : live;
                const int columns = keys / 8 * 2 + max(min(keys % 8 - 2 * (lane % 4), 2), 0);
                seen[half] |= ((1u << columns) - 1) << i * (Plan::kBox / 4);
            }
        }
    } else {
#pragma unroll 1
        for (int j = 0; j < Plan::kKeys / 8; ++j) {
            const u32 token = token_of<Plan>(notes, 8 * j) + 2 * (lane % 4);
            const u32 valid = sight.valid8(token & ~7u) >> 2 * (lane % 4) & 3;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Of these two columns, those up to the row's last visible token.
                const int ahead = Plan::kCausal ? sight.mine[half] - int(token) : 1;
                seen[half] |= (ahead < 0 ? 0 : ahead == 0 ? valid & 1 : valid) << 2 * j;
            }
        }
    }
}

// The bits come from a rolled loop first, then the scores: unrolled together the two took so many registers that they spilled.
template <typename Plan>
DEVICE void mask_scores(float (&s)[Plan::kKeys / 8][4], const TileNotes<Plan::kBoxes>& notes, const Sight<Plan>& sight, int lane) {
    u32 seen[2];
    seen_columns<Plan>(seen, notes, sight, lane);
#pragma unroll
    for (int j = 0; j < Plan::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (!(seen[e / 2] >> (2 * j + e % 2) & 1)) s[j][e] = NEG_INF;
}

// The largest magnitudes of the even and of the odd ones of many elements, as bits: infinity and NaN are above all others.
template <typename T>
struct Magnitudes {
    u32 most = 0;

    DEVICE void take(const uint4& x) {
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("max.u16x2 %0, %0, %1;" : "+r"(most) : "r"(words[i] & 0x7fff7fff));
    }
    DEVICE bool finite() const {
        constexpr u32 kInfinity = kIsBf16<T> ? 0x7f80 : 0x7c00;
        return (most & 0xffff) < kInfinity && most >> 16 < kInfinity;
    }
};

// Zeros the values of dead keys in boxes that were loaded. True, in the whole warpgroup: a key that only some queries see
// holds a value that is not finite. Warpgroups that share the tile write the same zeros and come to the same answer.
template <typename Plan>
DEVICE bool clear_dead_values(u8* tile, const TileNotes<Plan::kBoxes>& notes, const Sight<Plan>& sight, int thread, int barrier) {
    constexpr int kSharers = 128 / Plan::kKeys;         // threads of one key
    const int key = thread % Plan::kKeys, part = thread / Plan::kKeys;
    const u32 token = token_of<Plan>(notes, key);
    const bool loaded = notes.token[key / Plan::kBox] != kNoToken, dead = sight.dead(token);
    Magnitudes<typename Plan::Element> seen_by_some;
    if (loaded && (dead || (Plan::kCausal && int(token) > sight.first))) {
#pragma unroll
        for (int i = 0; i < Plan::kHeadDim / 8 / kSharers; ++i) {
            const int piece = part * (Plan::kHeadDim / 8 / kSharers) + i;
            // Start at another 16 bytes in each row: neighbouring rows would meet in the same banks.
            auto* at = reinterpret_cast<uint4*>(tile + piece / 8 * Plan::kColumnBytes + key * 128 + (piece + key) % 8 * 16);
            if (dead) *at = make_uint4(0, 0, 0, 0);
            else seen_by_some.take(*at);
        }
    }
    fence_async_proxy();
    if constexpr (Plan::kCausal) return named_barrier_any(barrier, 128, !seen_by_some.finite());
    named_barrier(barrier, 128);
    return false;
}

// Zeros every value that is not finite, once all of the chain's warpgroups are done with them.
template <typename Plan>
DEVICE void clear_nonfinite_values(u8* tile, int thread, int barrier) {
    named_barrier(barrier, Plan::kChainThreads);
    for (int i = thread; i < Plan::kTileBytes / 16; i += 128) {
        auto* at = reinterpret_cast<uint4*>(tile) + i;
        Magnitudes<typename Plan::Element> eight;
        eight.take(*at);
        if (!eight.finite()) *at = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    named_barrier(barrier, Plan::kChainThreads);
}

// o += p.v on plain arithmetic, over keys with a positive probability only. `p`: operand A of the product.
template <typename Plan>
DEVICE void add_seen_values(float (&o)[Plan::kChunks][Plan::kChunk / 8][4], const u32 (&p)[Plan::kKeys / 16][4], const u8* tile, int lane) {
    using T = typename Plan::Element;
#pragma unroll
    for (int j = 0; j < Plan::kKeys / 8; ++j) {
#pragma unroll 1
        for (int k = 0; k < 8; ++k) {
            const int holder = (lane & ~3) + k / 2;
            const float upper = to_float<T>(__shfl_sync(~0u, p[j / 2][j % 2 * 2], holder) >> k % 2 * 16 & 0xffff);
            const float lower = to_float<T>(__shfl_sync(~0u, p[j / 2][j % 2 * 2 + 1], holder) >> k % 2 * 16 & 0xffff);
            const u8* row = tile + (8 * j + k) * 128 + lane % 4 * 4;
#pragma unroll
            for (int c = 0; c < Plan::kHeadDim / 8; ++c) {
                const u32 pair = *reinterpret_cast<const u32*>(row + c / 8 * Plan::kColumnBytes + (c % 8 ^ k) * 16);
                const float v0 = to_float<T>(pair & 0xffff), v1 = to_float<T>(pair >> 16);
                float (&to)[4] = o[c * 8 / Plan::kChunk][c % (Plan::kChunk / 8)];
                if (upper > 0.f) to[0] += upper * v0, to[1] += upper * v1;
                if (lower > 0.f) to[2] += lower * v0, to[3] += lower * v1;
            }
        }
    }
}
