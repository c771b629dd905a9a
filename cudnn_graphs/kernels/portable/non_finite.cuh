// NaN and infinities in values that some query rows of a tile see and others do not: only the causal diagonal
// has such keys, every other unseen key is loaded as zeros. There the product P.V takes clamped values, and
// what was clamped is noted here: per channel, the first token with a positive and with a negative infinity
// (a NaN is both). A row that sees that token gets it back in the epilogue; inf - inf makes the NaN.
#pragma once
#include "common/numeric.cuh"
#include "common/ptx.cuh"
#include "portable/cta_state.cuh"
#include "portable/paged_config.cuh"

template <typename C>
struct NonFinite {
    // [sign][channel] tokens, kHidden: none
    static DEVICE int* first(int sign) { return reinterpret_cast<int*>(shared_memory + C::kNonFinite) + sign * C::kD; }

    static DEVICE void clear() {
        for (int i = threadIdx.x; i < 2 * C::kD; i += C::kThreads) first(0)[i] = kHidden;
    }

    // Whether the values of one warp group's keys hold any. One warp.
    static DEVICE bool any(int stage, int key_warp) {
        const char* v = shared_memory + C::kV + stage * C::kTileBytes + key_warp * C::kWarpKeys * C::kRowBytes;
        u32 changed = 0;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < C::kWarpKeys * C::kChunks; i += 32) {
            const uint4 x = reinterpret_cast<const uint4*>(v)[i];
            changed |= clamp_finite2<typename C::T>(x.x) ^ x.x | clamp_finite2<typename C::T>(x.y) ^ x.y;
            changed |= clamp_finite2<typename C::T>(x.z) ^ x.z | clamp_finite2<typename C::T>(x.w) ^ x.w;
        }
        return __any_sync(~0u, changed != 0);
    }

    // Notes what the keys of one warp group hold, and clamps it in place. One warp; the others of the group may
    // do the same meanwhile: an element is noted before it is clamped, so whoever finds it clean need not note it.
    static DEVICE void take_out(int stage, int key_warp) {
        const int* tokens = reinterpret_cast<const int*>(shared_memory + C::kTokens) + stage * C::kKeys;
        char* v = shared_memory + C::kV + stage * C::kTileBytes;
#pragma unroll 1
        for (int key = key_warp * C::kWarpKeys; key < (key_warp + 1) * C::kWarpKeys; ++key)
#pragma unroll 1
            for (int channel = threadIdx.x % 32 * 2; channel < C::kD; channel += 64) {
                volatile u32* pair = reinterpret_cast<u32*>(v + swizzled<C>(key, channel / 8) + channel % 8 * 2);
                const u32 x = *pair;
                note(channel, to_float<typename C::T>(x & 0xffff), tokens[key]);
                note(channel + 1, to_float<typename C::T>(x >> 16), tokens[key]);
                __threadfence_block();
                *pair = clamp_finite2<typename C::T>(x);
            }
        __syncwarp();
    }

    // What a row whose last visible token is `limit` has to add in `channel`: 0, an infinity or NaN.
    static DEVICE float seen(int channel, int limit) {
        return (first(0)[channel] <= limit ? -NEG_INF : 0.f) + (first(1)[channel] <= limit ? NEG_INF : 0.f);
    }

private:
    static DEVICE void note(int channel, float value, int token) {
        if (is_finite(value)) return;
        if (!(value < 0.f)) atomicMin(first(0) + channel, token);
        if (!(value > 0.f)) atomicMin(first(1) + channel, token);
    }
};
