// What one launch of a packed query-sparse kernel is told. The host packs this struct in engines/qsa_launch.py:
// same fields, same order, naturally aligned.
#pragma once
#include "common/types.cuh"

constexpr int kQsaDim = 256;
constexpr int kQsaBlock = 4;            // tokens of one selectable block

// Which (tile, KV head) items of the sm90 engine go where; in the workspace, rewritten by every launch.
struct QsaSchedule {
    i32 next_item;                      // the next one that no CTA of the union kernel has taken yet
    i32 gather_count;                   // items in gather_items
    i32 pad[62];
};

struct QsaParams {
    const u16* q;               // [T, num_kv_heads * group, 256] bf16
    const u16* k;               // [T, num_kv_heads, 256]
    const u16* v;
    u16* out;                   // like q
    float* out_fp32;            // like q
    float* lse;                 // [num_kv_heads * group, T] natural log
    const u8* sel_blocks;       // [T, num_blocks]; null: indices
    const i32* lo;              // [T] first and last token that a query may attend
    const i32* hi;
    const i32* blk_base;        // [T] first block and first token of a query's sequence
    const i32* tok_base;
    const i32* block_first;     // [num_blocks] ascending
    const i32* block_last;
    const i32* indices;         // [T, width] token ids
    QsaSchedule* schedule;      // sm90 only, as are the next two
    i32* item_mode;             // [items] QsaMode
    i32* gather_items;          // [items] in no particular order
    i32 num_tokens, num_blocks, width, num_kv_heads;
    i32 sm_count;
    u32 q_factor;               // two bf16: 1, -1 or 0. Carries the sign of the scale, so that the kernels' scale is never
    float scale_log2;           // negative and the largest score has the largest product; |scale| * log2(e)
};

// q times +-1 or 0, two elements: exact; a NaN or Inf times 0 stays the NaN it is in the definition.
DEVICE u32 qsa_signed_query(u32 two, u32 factor) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(two), "r"(factor), "r"(0x80008000u));
    return r;
}
