// The one-shot's look at live values: one pass over page lists, lengths and block lists, eight words out.
// Every word is the atomic minimum over all offenders of (where << 32 | value), all ones when there is none.
#pragma once
#include "common/paged_params.cuh"

enum InspectWord { kWidestRow, kPageId, kLength, kPageTable, kBlockIndptr, kBlockId, kBlockOrder, kInspectWords };

DEVICE void report(u64* words, InspectWord word, u32 where, i32 value) { atomicMin(words + word, u64(where) << 32 | u32(value)); }

// One warp checks one request: its length, its page list, and every page id of its live prefix.
DEVICE void inspect_request(const PagedParams& p, u64* words, int b, int lane) {
    int length = p.seq_lens[b];
    if (lane == 0 && (length < (p.causal ? max(p.seq_len_q, 1) : 1) || length > p.max_seq_len_kv)) report(words, kLength, b, length);
    i64 first = i64(b) * p.page_table_stride, span = p.page_list_len;
    if (p.page_indptr != nullptr) {
        first = p.page_indptr[b];
        i64 last = p.page_indptr[b + 1];
        bool broken = first < 0 || last < first || last > p.page_list_len || (b == 0 && first != 0);
        if (lane == 0 && broken) report(words, kPageTable, b, i32(last));
        span = broken ? 0 : last - first;
    }
    i64 live = length > 0 ? ceil_div<i64>(length, p.page_size) : 0;
    if (lane == 0 && live > span) report(words, kPageTable, b, i32(span));
    for (i64 i = lane; i < min(live, span); i += 32) {
        int page = p.pages[first + i];
        if (page < 0 || page >= p.num_pages) report(words, kPageId, b, page);
    }
}

// One warp checks one row: its range, its ids, their order.
DEVICE void inspect_row(const PagedParams& p, u64* words, int flat, int lane) {
    int b = flat / (p.pattern_heads * p.rows), rest = flat % (p.pattern_heads * p.rows);
    i64 at = i64(b) * p.pattern_heads * (p.rows + 1) + i64(rest / p.rows) * (p.rows + 1) + rest % p.rows;
    i64 begin = p.block_indptr[at], end = p.block_indptr[at + 1];
    if (begin < 0 || end < begin || end > p.num_block_indices) {
        if (lane == 0) report(words, kBlockIndptr, flat, i32(end));
        return;
    }
    if (lane == 0) atomicMin(words + kWidestRow, u64(0xffffffffu - u32(end - begin)));
    for (i64 i = begin + lane; i < end; i += 32) {
        int block = p.block_indices[i];
        if (block < 0 || i64(block) * p.kv_block_size >= p.seq_lens[b]) report(words, kBlockId, flat, block);
        if (i > begin && block <= p.block_indices[i - 1]) report(words, kBlockOrder, flat, block);
    }
}

DEVICE void inspect_paged(const PagedParams& p, u64* words) {
    int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < p.batch) inspect_request(p, words, warp, lane);
    else if (warp - p.batch < p.batch * p.pattern_heads * p.rows) inspect_row(p, words, warp - p.batch, lane);
}
