// The sum of one (token, head) over parts of disjoint keys: by one warp, each lane with D / 32 consecutive channels.
// Every rank adds in rank order, so all get the same bits.
#pragma once
#include "common/numeric.cuh"

// N words, loaded or stored 16, 8 or 4 bytes at a time.
template <int N>
DEVICE void load_words(u32 (&to)[N], const void* from) {
    if constexpr (N == 1) {
        to[0] = *static_cast<const u32*>(from);
    } else if constexpr (N == 2) {
        const uint2 x = *static_cast<const uint2*>(from);
        to[0] = x.x, to[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 x = static_cast<const uint4*>(from)[i / 4];
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    }
}

template <typename T, int D>
struct PartSum {
    static constexpr int kPerLane = D / 32, kWords = kPerLane * int(sizeof(T)) / 4;
    float top, sum = 0.f, acc[kPerLane] = {};

    explicit DEVICE PartSum(float highest_lse) : top(highest_lse) {}

    // A part without visible keys (-inf) is left out, whatever it holds; a NaN is taken: it must show.
    DEVICE void add(float lse, const u32 (&words)[kWords]) {
        if (lse == NEG_INF) return;
        const float weight = exp2_approx((lse - top) * kLog2e);
        sum += weight;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            if constexpr (sizeof(T) == 4) acc[i] += weight * __uint_as_float(words[i]);
            else acc[i] += weight * to_float<T>(words[i / 2] >> (i % 2 * 16) & 0xffff);
        }
    }

    DEVICE void store(T* to) const {
        const float inverse = sum == 0.f ? 0.f : __fdividef(1.f, sum);      // an exact division is a call, and spilled acc around it
#pragma unroll
        for (int i = 0; i < kPerLane; i += 2) {
            if constexpr (sizeof(T) == 4) to[i] = acc[i] * inverse, to[i + 1] = acc[i + 1] * inverse;
            else *reinterpret_cast<u32*>(to + i) = pack2<T>(acc[i] * inverse, acc[i + 1] * inverse);
        }
    }

    DEVICE float lse() const { return sum == 0.f ? NEG_INF : top + log2_approx(sum) * kLn2; }
};

// Where an item = (b * seq_len + t) * num_heads + head lies in out [batch, seq_len, num_heads, D] and lse [batch, num_heads, seq_len].
template <typename Int>
struct ItemPlace {
    Int b, t, head, lse_at;

    DEVICE ItemPlace(Int item, Int seq_len, Int num_heads) {
        head = item % num_heads;
        const Int token = item / num_heads;
        b = token / seq_len, t = token % seq_len;
        lse_at = (b * num_heads + head) * seq_len + t;
    }
};
