// The layout of one 64 x 64 tile: which token a score column is, and which bytes of V belong to it.
//
// Scores leave the tensor cores two columns at a time, P enters them (8-bit A operand) four keys at a time.
// With columns ordered as below, four accumulators of two neighbouring 8-column tiles are four consecutive
// slots of V, so P needs no shuffle: interleaved16 V was laid out for K in token order; natural V needs K's
// rows permuted instead.
#pragma once
#include "common/sage_params.cuh"

template <bool kInterleaved>
struct SageTile {
    // The token (0 to 63 in its block) whose K row is row `row` of the tile, hence column `row` of the scores.
    DEVICE static int token(int row) {
        if (kInterleaved) return row;
        const int a = row / 8 % 2, j = row / 2 % 4, r = row % 2;
        return row / 16 * 16 + 4 * j + 2 * a + r;
    }

    // Ones in the bytes of visible tokens, for the four slots 16 * group + 4 * word + {0, 1, 2, 3} of V.
    DEVICE static u32 visible_bytes(int valid, int group, int word) {
        const int left = valid - 16 * group;
        if (!kInterleaved) return leading(left - 4 * word, 4);
        return leading(left - 2 * word, 2) | leading(left - 8 - 2 * word, 2) << 16;
    }

private:
    DEVICE static u32 leading(int bytes, int of) {
        if (bytes <= 0) return 0;
        return bytes >= of ? ~0u >> (32 - 8 * of) : (1u << 8 * bytes) - 1;
    }
};

// Clears the invisible bytes of a V tile [128][64 bytes], 16-byte units of a row at unit ^ (row / 2 % 4):
// 0 x NaN is NaN, so a masked score alone would let them through. One thread a row.
template <bool kInterleaved>
DEVICE void clear_invisible(u8* tile, int row, int valid) {
    for (int group = 0; group < 4; group++) {
        u32* unit = reinterpret_cast<u32*>(tile + row * 64 + (group ^ (row / 2 & 3)) * 16);
        for (int word = 0; word < 4; word++) unit[word] &= SageTile<kInterleaved>::visible_bytes(valid, group, word);
    }
}
