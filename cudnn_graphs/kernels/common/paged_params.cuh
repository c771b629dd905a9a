// What one launch of a paged block-sparse kernel is told, and the guards every such kernel applies to
// device values: the host trusts them, so nothing here may be read before it is checked.
//
// A row is (request b, KV head h, row r): q_block_size query tokens x group heads that share one list
// of KV blocks. The host packs this struct with `pack_params` in engines/paged_launch.py: same
// fields, same order, naturally aligned.
#pragma once
#include "common/types.cuh"

struct PagedParams {
    const void* q;              // [batch, seq_len_q, num_kv_heads * group, D]
    const void* k;              // [num_pages, num_kv_heads, page_size, D], page stride kv_page_stride
    const void* v;
    void* out;                  // like q, its own strides
    float* lse;                 // [batch, num_kv_heads * group, seq_len_q] natural log; null: not wanted
    const i32* page_indptr;     // [batch + 1] offsets into pages; null: pages is a table [batch, page_list_len]
    const i32* pages;
    const i32* block_indptr;    // [batch, pattern_heads, rows + 1] absolute offsets into block_indices
    const i32* block_indices;
    const i32* seq_lens;        // [batch] live KV tokens
    const u32* valid_bits;      // [batch, valid_bits_stride] words; null: none
    float* partial_out;         // [num_splits, batch * seq_len_q * num_qo_heads, D]; see merge_splits.cuh
    float* partial_lse;         // [num_splits, batch * seq_len_q * num_qo_heads]
    i64 q_stride_b, q_stride_t, q_stride_h;      // elements
    i64 out_stride_b, out_stride_t, out_stride_h;
    i64 kv_page_stride;         // elements between pages; heads and slots inside a page are compact
    i64 num_pages;
    i64 page_list_len;          // numel of pages, or the columns of the table
    i64 page_table_stride;      // elements between rows of the table
    i64 num_block_indices;
    i64 valid_bits_stride;
    i32 batch, seq_len_q, num_kv_heads, group;
    i32 rows;                   // ceil(seq_len_q / q_block_size)
    i32 q_block_size, kv_block_size, page_size;
    i32 pattern_heads;          // num_kv_heads, or 1 when all heads share one pattern
    i32 max_seq_len_kv, max_blocks_per_row;
    i32 num_splits;
    float scale_log2;           // sm_scale * log2(e)
    i32 causal;                 // also a template flag of the kernels; here for the guard
};

// The KV side of one row, every value in it checked against what the tensors hold.
struct RowSpan {
    const i32* blocks;          // count ids
    const i32* pages;           // page_count ids of this request
    i64 page_count;
    i32 count;                  // 0 for an empty and for a bad row
    i32 length;                 // live tokens
    bool bad;                   // range, width or length broken: exact zeros, lse -inf
};

DEVICE RowSpan resolve_row(const PagedParams& p, int b, int h, int r) {
    RowSpan row;
    row.length = p.seq_lens[b];
    bool bad = row.length < 0 || row.length > p.max_seq_len_kv;
    bad |= p.causal && row.length > 0 && row.length < p.seq_len_q;
    i64 at = (i64(b) * p.pattern_heads + (p.pattern_heads == 1 ? 0 : h)) * (p.rows + 1) + r;
    i64 begin = p.block_indptr[at], end = p.block_indptr[at + 1];
    bad |= begin < 0 || end < begin || end > p.num_block_indices || end - begin > p.max_blocks_per_row;
    row.bad = bad;
    row.count = bad || row.length == 0 ? 0 : i32(end - begin);
    row.blocks = p.block_indices + (bad ? 0 : begin);
    i64 first = i64(b) * p.page_table_stride, last = first + p.page_list_len;
    if (p.page_indptr != nullptr) {
        first = p.page_indptr[b];
        last = p.page_indptr[b + 1];
        if (first < 0 || last < first || last > p.page_list_len) first = last = 0;  // selecting anything is then bad
    }
    row.pages = p.pages + first;
    row.page_count = last - first;
    return row;
}

DEVICE bool block_in_length(const PagedParams& p, const RowSpan& row, int block) {
    return block >= 0 && i64(block) * p.kv_block_size < row.length;
}

// The physical page of a logical page of this request, or -1 when it is past the list or outside the cache.
DEVICE int lookup_page(const PagedParams& p, const RowSpan& row, i64 logical) {
    if (logical < 0 || logical >= row.page_count) return -1;
    int page = row.pages[logical];
    return page >= 0 && page < p.num_pages ? page : -1;
}
