// Reading the bitmap of packed query-sparse attention: which blocks can matter to a query, and the bits of
// sixteen blocks at once. Nothing outside the tensors is read, whatever their alignment.
#pragma once
#include "common/qsa_params.cuh"

// The tokens query t may attend, clamped into the batch (lo > hi: none), and a range of blocks that covers them.
struct QueryWindow {
    i32 lo, hi;
    i32 first_block, end_block;
};

DEVICE QueryWindow query_window(const QsaParams& p, int t) {
    const i32 lo = max(p.lo[t], 0), hi = min(p.hi[t], p.num_tokens - 1);
    if (lo > hi) return {0, -1, 0, 0};
    // Within one sequence blocks are counted off by fours. Where the neighbours of that range say otherwise
    // (a window that leaves its sequence), every block is looked at: a range too wide costs time only.
    const i64 base = p.blk_base[t], origin = p.tok_base[t];
    const i64 first = base + ((lo - origin) >> 2), end = base + ((hi - origin) >> 2) + 1;
    bool sure = first >= 0 && first < end && end <= p.num_blocks;
    if (sure && first > 0) sure = p.block_last[first - 1] < lo || p.block_first[first - 1] + 3 < lo;
    if (sure && end < p.num_blocks) sure = p.block_first[end] > hi;
    return sure ? QueryWindow{lo, hi, i32(first), i32(end)} : QueryWindow{lo, hi, 0, p.num_blocks};
}

// 0x80 in every byte that is not zero.
DEVICE u32 nonzero_bytes(u32 x) { return (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u; }

// Sixteen bytes from 16-byte words `low` and `high`, the first at byte `shift` (1..15) of `low`.
DEVICE uint4 funnel16(uint4 low, uint4 high, u32 shift) {
    if (shift & 8) low = {low.z, low.w, high.x, high.y}, high = {high.z, high.w, 0, 0};
    if (shift & 4) low = {low.y, low.z, low.w, high.x}, high.x = high.y;
    const u32 bits = (shift & 3) * 8;
    return {__funnelshift_r(low.x, low.y, bits), __funnelshift_r(low.y, low.z, bits), __funnelshift_r(low.z, low.w, bits),
            __funnelshift_r(low.w, high.x, bits)};
}

// Bytes at, at + 1, ... at + 15 of the bitmap as one flat array; zeros outside it.
DEVICE uint4 bitmap16(const QsaParams& p, i64 at) {
    const i64 total = i64(p.num_tokens) * p.num_blocks;
    const u8* from = p.sel_blocks + at;
    const u32 shift = u32(u64(from)) & 15;
    if (shift == 0 && at + 16 <= total) return *reinterpret_cast<const uint4*>(from);
    if (at >= shift && at - shift + 32 <= total) {
        const uint4* aligned = reinterpret_cast<const uint4*>(from - shift);
        return funnel16(aligned[0], aligned[1], shift);
    }
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (at + i < total) words[i / 4] |= u32(from[i]) << (i % 4 * 8);
    return {words[0], words[1], words[2], words[3]};
}

// Of sixteen blocks from `block` on, a bit for each that the bytes select and that lies in [first, end).
DEVICE u32 selected16(uint4 bytes, int block, int first, int end) {
    const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= ((nonzero_bytes(words[i]) >> 7) * 0x10204080u >> 28) << (4 * i);
    const int skip = min(max(first - block, 0), 16), keep = min(max(end - block, 0), 16);
    return bits & ((1u << keep) - 1) & ~((1u << skip) - 1);
}
