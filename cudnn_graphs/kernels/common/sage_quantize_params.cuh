// What one launch of the Sage quantizer is told. The host packs it in engines/sage_quantizer.py: same fields,
// same order, naturally aligned.
#pragma once
#include "common/types.cuh"

struct Strides4 { i64 b, h, s, d; };        // elements

struct SageQuantizeParams {
    const void* q;              // [batch, heads, seq_len_q, 128], any strides
    const void* k;              // [batch, heads, seq_len_k, 128]
    const void* v;
    u8* q_int8;                 // [batch, heads, seq_len_q, 128] contiguous, as are all outputs
    u8* k_int8;
    u8* v_fp8;                  // [batch, heads, 128, num_blocks * 64]
    float* q_scale;             // [batch, heads, ceil(seq_len_q / 128) * 4]
    float* k_scale;             // [batch, heads, num_blocks]
    float* v_scale;             // [batch, heads, 128]
    float* k_mean;              // [batch, heads, 128]
    float* block_sums;          // [batch, heads, num_blocks, 128] scratch
    float* lane_sums;           // [batch, heads, 32, 128] scratch
    u32* v_amax;                // [batch, heads, 128] fp32 bits, zero at launch
    u32* progress;              // zero at launch: the next task to draw, then the counters below
    Strides4 q_strides, k_strides, v_strides;
    i32 heads, batch_heads;
    i32 seq_len_q, seq_len_k, num_blocks;
    i32 smooth_k, interleaved;

    DEVICE u32* mean_ready(int head) const { return progress + 1 + head; }
    DEVICE u32* scans_done(int head) const { return progress + 1 + batch_heads + head; }
    DEVICE u32* lanes_done(int head) const { return progress + 1 + 2 * batch_heads + head; }
    DEVICE u32* blocks_done(int head, int n) const { return progress + 1 + 3 * batch_heads + 32 * head + n; }   // of running sum n
};
