// One shape of the portable paged kernel: its tile, who computes what, and the shared-memory plan.
#pragma once
#include "common/numeric.cuh"
#include "common/types.cuh"

template <typename T_, int kD_, int kFragments_, int kRowWarps_, int kKeyWarps_, int kKeys_, int kStages_,
          bool kCausal_, bool kBits_, bool kTailOnly_>
struct PagedConfig {
    using T = T_;
    static constexpr int kD = kD_;
    static constexpr int kFragments = kFragments_;      // 16-row fragments of one warp
    static constexpr int kRowWarps = kRowWarps_;        // warps side by side over the query rows
    static constexpr int kKeyWarps = kKeyWarps_;        // groups of such warps, each with its share of every key tile
    static constexpr int kKeys = kKeys_;                // keys of one tile
    static constexpr int kStages = kStages_;            // tiles in shared memory
    static constexpr bool kCausal = kCausal_;
    static constexpr bool kBits = kBits_;               // valid bits
    static constexpr bool kTailOnly = kTailOnly_;       // a row's partial last block alone, always as a partial result

    static constexpr int kWarps = kRowWarps * kKeyWarps;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRows = 16 * kFragments * kRowWarps;   // query rows (tokens x heads) of one CTA
    static constexpr int kWarpKeys = kKeys / kKeyWarps;         // keys that one warp multiplies
    static constexpr int kLoadKeys = kKeys / kWarps;            // keys that one warp loads: its own group's
    static constexpr int kChunks = kD / 8;                      // 16-byte chunks of a row of Q, K or V
    static constexpr int kRowBytes = kD * 2;
    static constexpr int kTileBytes = kKeys * kRowBytes;

    static_assert(kStages >= 2 && kWarpKeys % 16 == 0 && kLoadKeys <= 32 && kLoadKeys * kChunks % 32 == 0, "not a shape this kernel has");

    // Shared memory, byte offsets. The fp32 exchange of the epilogue reuses Q and the tiles.
    static constexpr int kQ = 0;
    static constexpr int kK = kRows * kRowBytes;                // [stage][key][D], chunks swizzled
    static constexpr int kV = kK + kStages * kTileBytes;
    static constexpr int kExchange = 0;                         // [key warp][row][D] floats
    static constexpr int kTilesEnd = kV + kStages * kTileBytes;
    static constexpr int kExchangeEnd = kKeyWarps * kRows * kD * 4;
    static constexpr int kTokens = kTilesEnd > kExchangeEnd ? kTilesEnd : kExchangeEnd;    // [stage][key] ints
    static constexpr int kSpans = kTokens + kStages * kKeys * 4;                            // [stage][warp] int2
    static constexpr int kTops = kSpans + kStages * kWarps * 8;                             // [key warp][row] floats
    static constexpr int kSums = kTops + kKeyWarps * kRows * 4;
    static constexpr int kState = kSums + kKeyWarps * kRows * 4;                            // CtaState
    static constexpr int kGather = kState + 96;                                             // GatherState
    static constexpr int kGatherBytes = 48;
    static constexpr int kNonFinite = kGather + kGatherBytes;                               // [sign][D] ints, causal only
    static constexpr int kLimits = kNonFinite + (kCausal ? 8 * kD : 0);                     // [row] ints, causal only
    static constexpr int kSmemBytes = kLimits + (kCausal ? 4 * kRows : 0);
};

constexpr int kHidden = 0x7fffffff;     // the token of a key that no query of the CTA sees: past every limit

extern __shared__ __align__(1024) char shared_memory[];

// Byte offset of a 16-byte chunk in a tile of rows of kD elements: the XOR puts a chunk of eight
// neighbouring rows in eight different bank groups, as ldmatrix reads them.
template <typename C>
DEVICE u32 swizzled(int row, int chunk) { return row * C::kRowBytes + ((chunk ^ (row & 7)) << 4); }
