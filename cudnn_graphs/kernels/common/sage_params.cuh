// What one launch of a Sage block-sparse kernel is told, and how it reads block lists: the host trusts
// device values, so ids, counts and sizes are checked here before anything they name is touched.
//
// The host packs SageParams in engines/sage_launch.py: same fields, same order, naturally aligned.
#pragma once
#include "common/types.cuh"

constexpr int kSageDim = 128;           // head dim
constexpr int kSageBlock = 64;          // tokens of a query row and of a key block

struct SageParams {
    const u8* q;                // int8 [batch, heads, seq_len_q, 128]
    const u8* k;                // int8 [batch, heads, seq_len_k, 128]
    const u8* v;                // e4m3 [batch, heads, 128, num_blocks * 64]
    const float* q_scale;       // [batch, heads, ceil(seq_len_q / 128) * 4]
    const float* k_scale;       // [batch, heads, num_blocks]
    const float* v_scale;       // [batch, heads, 128]
    u32* out;                   // bf16 pairs, [batch, heads, seq_len_q, 128]
    float* lse;                 // [batch, heads, seq_len_q] natural log; null: not wanted
    const i32* block_index;     // [batch, heads, rows, capacity]
    const i32* counts;          // [batch, heads, rows]; null: `count` in every row
    const i32* block_sizes;     // leading visible tokens of each block; null: all
    i32 heads, batch_heads, seq_len_q, seq_len_k;
    i32 rows, num_blocks, capacity, count;
    i32 sizes_stride_b, sizes_stride_h;
    i32 contiguous;             // only the last listed id is read, the others count down to it modulo num_blocks
    float scale_log2;           // softmax_scale * log2(e)
};

// `x`, such that nothing computed from it is kept from one call to the next: where addresses hoisted out of
// the loop over key blocks would spill.
DEVICE int recomputed(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Query rows [64 * row, 64 * row + 64) of one head. Rows of one head run together: its K and V stay in L2.
struct SageItem {
    i32 index, head, row;       // head counts over batch and heads
    DEVICE SageItem(const SageParams& p, int item) : index(item), head(item / p.rows), row(item % p.rows) {}
};

struct SageBlock {
    i32 id = 0;
    i32 valid = 0;              // leading visible tokens, 1 to 64; 0: the list has ended
    float scale = 1.0f;         // of K
};

// The visible blocks of one row, in list order, for a whole warp: each lane looks at one listed id in 32, and their
// ids were loaded a batch before. So the loads that hang on one another are waited for once in 32 blocks.
struct SageBlockReader {
    const SageParams& p;
    const i32 index, head;      // addresses are made from these each time: pointers would be kept in registers
    i32 count;
    i32 seen = 0;               // listed ids in this batch and before
    i32 id_after;               // this lane's id of the next batch
    u32 visible = 0;            // lanes of this batch whose block is still to be handed out
    SageBlock block;            // this lane's of this batch

    DEVICE SageBlockReader(const SageParams& params, const SageItem& item) : p(params), index(item.index), head(item.head) {
        count = p.counts == nullptr ? p.count : p.counts[index];
        if (count < 0 || count > p.capacity) count = 0;
        id_after = listed(threadIdx.x % 32);
    }

    DEVICE i32 listed(i32 i) const {
        if (i >= count) return -1;
        const i32* list = p.block_index + i64(recomputed(index)) * p.capacity;
        if (!p.contiguous || i == count - 1) return list[i];
        i64 id = (i64(list[count - 1]) - (count - 1 - i)) % p.num_blocks;
        return i32(id < 0 ? id + p.num_blocks : id);
    }

    DEVICE i32 size(i32 id) const {
        if (p.block_sizes == nullptr) return kSageBlock;
        const i32 head = recomputed(this->head);
        return p.block_sizes[i64(head / p.heads) * p.sizes_stride_b + i64(head % p.heads) * p.sizes_stride_h + id];
    }

    DEVICE void next_batch() {
        block = {};
        block.id = id_after;
        if (u32(block.id) < u32(p.num_blocks)) {
            block.valid = min(min(size(block.id), kSageBlock), p.seq_len_k - block.id * kSageBlock);
            block.scale = p.k_scale[i64(recomputed(head)) * p.num_blocks + block.id];
        }
        visible = __ballot_sync(~0u, block.valid > 0);
        seen += 32;
        id_after = listed(seen + recomputed(threadIdx.x) % 32);
    }

    DEVICE SageBlock next() {
        while (visible == 0) {
            if (seen >= count) return {};
            next_batch();
        }
        const int lane = __ffs(visible) - 1;
        visible &= visible - 1;
        return {__shfl_sync(~0u, block.id, lane), __shfl_sync(~0u, block.valid, lane), __shfl_sync(~0u, block.scale, lane)};
    }
};
