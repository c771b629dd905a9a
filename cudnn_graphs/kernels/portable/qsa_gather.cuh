// Packed query-sparse attention, one query token and KV head at a time: the group's heads are rows of one
// 16-row tensor core fragment, the warps of a CTA share out the keys, and each warp gathers its own through a
// private ring by cp.async, so that no barrier stands between a key and its use.
//
// Only keys that the query attends are read. Slots of a tile that hold none are zeros and masked, so no
// foreign NaN can meet a probability of 0.
#pragma once
#include "common/ptx.cuh"
#include "common/qsa_selection.cuh"
#include "common/softmax.cuh"

template <int kGroupT, bool kIndexedT, bool kListedT, int kWarpsT, int kQueriesPerItemT>
struct QsaGatherConfig {
    static constexpr int kGroup = kGroupT;                  // query heads of a KV head
    static constexpr bool kIndexed = kIndexedT;             // token ids instead of a bitmap
    static constexpr bool kListed = kListedT;               // only the items of gather_items, kQueriesPerItem queries each
    static constexpr int kQueriesPerItem = kQueriesPerItemT;
    static constexpr int kWarps = kWarpsT, kThreads = 32 * kWarps;

    static constexpr int kKeys = 16;                        // of a tile: the k of one product
    static constexpr int kRowBytes = kQsaDim * 2;
    static constexpr int kSlotBytes = kKeys * kRowBytes;    // one tile of K or of V
    static constexpr int kSlots = 3;                        // two under way while one is used
    static constexpr int kEntryTokens = kIndexed ? 1 : kQsaBlock;
    static constexpr int kTileEntries = kKeys / kEntryTokens;
    static constexpr int kScan = 16 * kThreads;             // candidates looked at in one go
    static constexpr int kEntries = kIndexed ? 2064 + kScan : kScan + 1024;     // a usual row fits whole: 513 blocks, 2052 ids

    // Shared memory. The ring is free when a query is done: its shares are then added up there.
    static constexpr int kRing = 0, kWarpBytes = kSlots * kSlotBytes;
    static constexpr int kFirsts = kRing + kWarps * kWarpBytes;         // i32 [kEntries] token, or first token of a block
    static constexpr int kMasks = kFirsts + 4 * kEntries;               // u8 [kEntries] a bit per visible token of a block
    static constexpr int kCounts = kMasks + (kIndexed ? 0 : kEntries);  // i32 [kWarps]
    static constexpr int kTops = kCounts + 4 * kWarps;                  // float [kWarps][16]
    static constexpr int kSums = kTops + 64 * kWarps;
    static constexpr int kState = kSums + 64 * kWarps;
    static constexpr int kSmemBytes = kState + 28;
    static_assert(kGroup <= 16 && kEntries % 16 == 0 && kWarps * 16 * kRowBytes * 2 <= kWarps * kWarpBytes);
};

// At file scope, so that every address in it is a constant: as pointers they cost this kernel registers it lacks.
extern __shared__ __align__(1024) char qsa_smem[];

// What one query attends, as entries in shared memory: tokens, or blocks with a bit per visible token. Its
// state lies there too, for the same reason.
template <typename C>
struct KeyList {
    i32 t, h;                   // query and KV head
    QueryWindow window;
    i32 next;                   // candidate not looked at yet: a block, or a place in the row of indices

    static DEVICE KeyList& shared() { return *reinterpret_cast<KeyList*>(qsa_smem + C::kState); }
    static DEVICE i32* firsts() { return reinterpret_cast<i32*>(qsa_smem + C::kFirsts); }
    static DEVICE u8* masks() { return reinterpret_cast<u8*>(qsa_smem + C::kMasks); }
    static DEVICE i32* counts() { return reinterpret_cast<i32*>(qsa_smem + C::kCounts); }

    DEVICE void start(const QsaParams& p, int query, int kv_head) {
        if (threadIdx.x == 0) {
            t = query;
            h = kv_head;
            window = C::kIndexed ? QueryWindow{0, query, 0, p.width} : query_window(p, query);
            next = window.first_block & ~15;
        }
        __syncthreads();
    }

    // Uniform between two fills.
    DEVICE bool done() const { return next >= window.end_block; }

    // A bit for each of sixteen candidates that is listed.
    DEVICE u32 candidates(const QsaParams& p, int from) const {
        if (from >= window.end_block) return 0;
        if constexpr (!C::kIndexed) return selected16(bitmap16(p, i64(t) * p.num_blocks + from), from, window.first_block, window.end_block);
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int token = from + i < window.end_block ? p.indices[i64(t) * p.width + from + i] : -1;
            bits |= u32(token >= 0 && token <= t) << i;
        }
        return bits;
    }

    // Refills the list, in order, from as many candidates as are sure to fit, and returns its size. All threads.
    DEVICE int fill(const QsaParams& p) {
        int size = 0, from = next + 16 * threadIdx.x;
        u32 ahead = C::kIndexed ? 0 : candidates(p, from);      // read one round early, so that only the first waits for memory
        for (; from - 16 * i32(threadIdx.x) < window.end_block && size + C::kScan <= C::kEntries; from += C::kScan) {
            u32 bits = C::kIndexed ? candidates(p, from) : ahead;
            if constexpr (!C::kIndexed) ahead = candidates(p, from + C::kScan);
            const int at = place_among_all(__popc(bits), size);
            for (i32* to = firsts() + at; bits != 0; bits &= bits - 1) {
                const int candidate = from + __ffs(bits) - 1;
                *to++ = C::kIndexed ? p.indices[i64(t) * p.width + candidate] : candidate;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) next = from;
        if constexpr (!C::kIndexed) resolve_blocks(p, size);
        __syncthreads();
        return size;
    }

    // Where this thread's `mine` entries go behind `size` others; adds what all threads have to `size`.
    static DEVICE int place_among_all(int mine, int& size) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int before = mine, at = size;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) counts()[warp] = before;
        __syncthreads();
        for (int w = 0; w < C::kWarps; ++w) {
            if (w < warp) at += counts()[w];
            size += counts()[w];
        }
        return at + before - mine;
    }

    // Block ids to first tokens and visible bits.
    DEVICE void resolve_blocks(const QsaParams& p, int size) const {
        const int lo = window.lo, hi = window.hi;
#pragma unroll 4
        for (int i = threadIdx.x; i < size; i += C::kThreads) {
            const int block = firsts()[i], first = p.block_first[block], last = min(p.block_last[block], hi);
            u32 mask = 0;
#pragma unroll
            for (int j = 0; j < kQsaBlock; ++j) mask |= u32(first + j >= lo && first + j <= last) << j;
            firsts()[i] = first;
            masks()[i] = u8(mask);
        }
    }

    // The visible token in place `key` of a tile, or -1.
    static DEVICE int token(int size, int tile, int key) {
        const int entry = tile * C::kTileEntries + key % C::kKeys / C::kEntryTokens;
        if (entry >= size) return -1;
        if constexpr (C::kIndexed) return firsts()[entry];
        const int j = key % kQsaBlock;
        return masks()[entry] >> j & 1 ? firsts()[entry] + j : -1;
    }
};

// One warp's part of one query.
template <typename C>
struct GatherWarp {
    float acc[kQsaDim / 8][4];
    OnlineSoftmax softmax;
    u32 query[kQsaDim / 16][4];         // A fragments of the whole product Q.K^T

    // Where 16-byte chunk `chunk` of a row of a slot lies: eight rows' same chunk falls into different banks. Slots start
    // at multiples of 512 bytes, so the chunk two further on is the address ^ 32.
    static DEVICE u32 place(u32 slot, int row, int chunk) { return slot + row * C::kRowBytes + ((chunk ^ (row & 7)) << 4); }

    static DEVICE void load_query(const u16* rows, u32 slot, int lane) {
#pragma unroll 4
        for (int r = 0; r < 16; ++r) cp_async16(place(slot, r, lane), rows + (r < C::kGroup ? r : 0) * kQsaDim + lane * 8, r < C::kGroup);
        cp_async_commit();
    }

    DEVICE void take_query(u32 slot, int lane, u32 factor) {
        const u32 at = place(slot, lane % 16, lane / 16);
#pragma unroll
        for (int kk = 0; kk < kQsaDim / 16; ++kk) {
            ldmatrix_x4(query[kk], at ^ 32 * kk);
#pragma unroll
            for (int i = 0; i < 4; ++i) query[kk][i] = qsa_signed_query(query[kk][i], factor);
        }
    }

    // One tile of K or of V by the tokens that the first lanes hold. Always a group, if an empty one.
    static DEVICE void load(const u16* lane_base, int token_stride, bool exists, int token, u32 slot, int lane) {
        if (exists) {
#pragma unroll 4
            for (int r = 0; r < C::kKeys; ++r) {
                const int key = __shfl_sync(~0u, token, r);
                cp_async16(place(slot, r, lane), lane_base + i64(max(key, 0)) * token_stride, key >= 0);
            }
        }
        cp_async_commit();
    }

    DEVICE void scores(float (&s)[2][4], u32 slot, int lane) const {
        float part[2][2][4] = {};       // even and odd products apart: two short chains instead of a long one
        const u32 at = place(slot, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
        for (int kk = 0; kk < kQsaDim / 16; ++kk) {
            u32 keys[4];
            ldmatrix_x4(keys, at ^ 32 * kk);
            mma_16x8x16<bf16>(part[kk % 2][0], query[kk], keys[0], keys[1]);
            mma_16x8x16<bf16>(part[kk % 2][1], query[kk], keys[2], keys[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = part[0][n][i] + part[1][n][i];
    }

    static DEVICE void mask(float (&s)[2][4], u32 seen, int lane) {
        seen >>= 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(seen >> (8 * n + i % 2) & 1)) s[n][i] = NEG_INF;
    }

    DEVICE void add_values(const float (&s)[2][4], u32 slot, int lane) {
        const u32 probabilities[4] = {pack2<bf16>(s[0][0], s[0][1]), pack2<bf16>(s[0][2], s[0][3]), pack2<bf16>(s[1][0], s[1][1]),
                                      pack2<bf16>(s[1][2], s[1][3])};
        const u32 at = place(slot, lane % 16, lane / 16);
#pragma unroll
        for (int c = 0; c < kQsaDim / 16; ++c) {
            u32 values[4];
            ldmatrix_x4_trans(values, at ^ 32 * c);
            mma_16x8x16<bf16>(acc[2 * c], probabilities, values[0], values[1]);
            mma_16x8x16<bf16>(acc[2 * c + 1], probabilities, values[2], values[3]);
        }
    }

    DEVICE void rescale(const float (&factor)[2]) {
        if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
        for (int n = 0; n < kQsaDim / 8; ++n) acc[n][0] *= factor[0], acc[n][1] *= factor[0], acc[n][2] *= factor[1], acc[n][3] *= factor[1];
    }

    // Every kWarps-th tile of the list. The query waits in the third slot.
    DEVICE void attend(int size, const QsaParams& p, int h, u32 ring) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int stride = p.num_kv_heads * kQsaDim;
        const u16 *k = p.k + h * kQsaDim + lane * 8, *v = p.v + h * kQsaDim + lane * 8;
        u32 here = ring, next = ring + C::kSlotBytes, third = ring + 2 * C::kSlotBytes;      // K, V, K of the next tile
        int tile = warp, token = KeyList<C>::token(size, tile, lane);
        bool exists = tile * C::kTileEntries < size;
        load(k, stride, exists, token, here, lane);
        load(v, stride, exists, token, next, lane);
        cp_async_wait<2>();
        __syncwarp();
        take_query(third, lane, p.q_factor);
        __syncwarp();
        while (exists) {
            const u32 seen = __ballot_sync(~0u, lane < C::kKeys && token >= 0);
            tile += C::kWarps;
            token = KeyList<C>::token(size, tile, lane);
            exists = tile * C::kTileEntries < size;
            load(k, stride, exists, token, third, lane);
            cp_async_wait<2>();
            __syncwarp();
            float s[2][4], factor[2];
            scores(s, here, lane);
            __syncwarp();
            load(v, stride, exists, token, here, lane);
            if (seen != 0xffffu) mask(s, seen, lane);
            softmax.raise(s, p.scale_log2, factor);
            rescale(factor);
#pragma unroll
            for (int n = 0; n < 2; ++n) softmax.exponentiate(s[n], p.scale_log2);
            cp_async_wait<2>();
            __syncwarp();
            add_values(s, next, lane);
            __syncwarp();
            const u32 used = next;
            next = here, here = third, third = used;
        }
        cp_async_wait<0>();
        __syncwarp();
    }
};

// Adds up the warps' shares in a fixed order and writes the query's rows. All threads.
template <typename C>
DEVICE void store_query(const QsaParams& p, GatherWarp<C>& part, int t, int h) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* tops = reinterpret_cast<float*>(qsa_smem + C::kTops);
    float* sums = reinterpret_cast<float*>(qsa_smem + C::kSums);
    float* shares = reinterpret_cast<float*>(qsa_smem + C::kRing);      // [warp][16][256], groups of 8 channels swizzled by row
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        const float sum = quad_sum(part.softmax.sum[half]);
        if (lane % 4 == 0) tops[warp * 16 + row] = part.softmax.top[half], sums[warp * 16 + row] = sum;
    }
    __syncthreads();                    // also: nobody reads a ring any more
    const auto top_of = [&](int row) {
        float top = tops[row];
        for (int w = 1; w < C::kWarps; ++w) top = fmaxf(top, tops[w * 16 + row]);
        return top;
    };
    const auto weight_of = [&](int w, int row, float top) { return tops[w * 16 + row] == NEG_INF ? 0.f : exp2_approx(tops[w * 16 + row] - top); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        const float weight = weight_of(warp, row, top_of(row));
#pragma unroll
        for (int n = 0; n < kQsaDim / 8; ++n)
            *reinterpret_cast<float2*>(shares + (warp * 16 + row) * kQsaDim + (n ^ (row & 7)) * 8 + lane % 4 * 2) =
                make_float2(part.acc[n][2 * half] * weight, part.acc[n][2 * half + 1] * weight);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C::kGroup * (kQsaDim / 8); i += C::kThreads) {
        const int row = i / (kQsaDim / 8), n = i % (kQsaDim / 8), head = h * C::kGroup + row;
        const float top = top_of(row);
        float sum = 0.f, x[8] = {};
#pragma unroll
        for (int w = 0; w < C::kWarps; ++w) {
            sum += sums[w * 16 + row] * weight_of(w, row, top);
            const float4* from = reinterpret_cast<const float4*>(shares + (w * 16 + row) * kQsaDim + (n ^ (row & 7)) * 8);
            const float4 lo = from[0], hi = from[1];
            x[0] += lo.x, x[1] += lo.y, x[2] += lo.z, x[3] += lo.w;
            x[4] += hi.x, x[5] += hi.y, x[6] += hi.z, x[7] += hi.w;
        }
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] *= inverse;
        const i64 at = (i64(t) * p.num_kv_heads * C::kGroup + head) * kQsaDim + n * 8;
        float4* wide = reinterpret_cast<float4*>(p.out_fp32 + at);
        wide[0] = make_float4(x[0], x[1], x[2], x[3]);
        wide[1] = make_float4(x[4], x[5], x[6], x[7]);
        *reinterpret_cast<uint4*>(p.out + at) =
            make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]), pack2<bf16>(x[4], x[5]), pack2<bf16>(x[6], x[7]));
        if (n == 0) p.lse[i64(head) * p.num_tokens + t] = sum == 0.f ? NEG_INF : (top + log2_approx(sum)) * kLn2;
    }
    __syncthreads();
}

template <typename C>
DEVICE void attend_query(const QsaParams& p, int t, int h) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 ring = smem_address(qsa_smem + C::kRing + warp * C::kWarpBytes);
    GatherWarp<C> part = {};
    KeyList<C>& list = KeyList<C>::shared();
    list.start(p, t, h);
    do {
        part.load_query(p.q + (i64(list.t) * p.num_kv_heads + list.h) * C::kGroup * kQsaDim, ring + 2 * C::kSlotBytes, lane);
        const int size = list.fill(p);
        part.attend(size, p, list.h, ring);
        __syncthreads();                // the list is overwritten next
    } while (!list.done());
    store_query<C>(p, part, list.t, list.h);
}

// Work: every (query, KV head), a KV head at a time so that its keys stay in L2, the longest rows first; or
// the queries of the listed items. Which CTA does a query changes nothing in its result.
template <typename C>
DEVICE void qsa_gather(const QsaParams& p) {
    if constexpr (C::kListed) {
        for (int i = blockIdx.x; i < p.schedule->gather_count * C::kQueriesPerItem; i += gridDim.x) {
            const int item = p.gather_items[i / C::kQueriesPerItem];
            const int t = item / p.num_kv_heads * C::kQueriesPerItem + i % C::kQueriesPerItem;
            if (t < p.num_tokens) attend_query<C>(p, t, item % p.num_kv_heads);
        }
    } else {
        const i64 work = i64(p.num_tokens) * p.num_kv_heads;
        for (i64 i = blockIdx.x; i < work; i += gridDim.x) attend_query<C>(p, p.num_tokens - 1 - i32(i % p.num_tokens), i32(i / p.num_tokens));
    }
}
