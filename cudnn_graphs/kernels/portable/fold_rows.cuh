// Around a folded cuDNN graph: cuDNN's batch is (request, KV head, row), its M tile a row's packed query rows
// (tokens x heads), its page table the row's full blocks as sub-pages of the cache. The partial last block is
// another kernel's, because cuDNN lets a NaN past the length through, unless the caller promised there is none.
//
// fold_row builds table and lengths and packs q; unfold_row merges cuDNN's result with the tail's and scatters it.
// One CTA per folded row; rows past the live batch get length 0.
#pragma once
#include "common/merge_splits.cuh"
#include "common/numeric.cuh"
#include "common/paged_params.cuh"

struct FoldParams {
    PagedParams paged;          // partial_out and partial_lse hold the tail's one part
    void* q;                    // [rows, packed_rows, D]
    const void* out;            // like q: cuDNN's result over full blocks
    const float* stats;         // [rows, packed_rows] its natural-log lse
    i32* table;                 // [rows, columns] sub-pages
    i32* seq_q;                 // [rows]
    i32* seq_kv;                // [rows]
    i32* row_notes;             // [rows] full blocks, and whether the row has a tail; kBadRow: zeros and lse -inf
    i64 sub_pages_per_page;     // page stride in sub-pages
    i32 columns, sub_page, packed_rows;
    i32 tail_in_graph;          // every byte of a listed block is promised finite: the graph takes the partial block too
};

constexpr int kFoldThreads = 256;
constexpr int kFoldBatch = 4;       // 16-byte chunks that a thread has in flight: copying is all there is to do
constexpr int kBadRow = -1;
constexpr int kHasTail = 1 << 30;
DEVICE bool has_tail(int notes) { return notes >= 0 && (notes & kHasTail); }

struct FoldedRow {
    int b, h, r;
    DEVICE explicit FoldedRow(const PagedParams& p) {
        int flat = blockIdx.x;
        r = flat % p.rows, h = flat / p.rows % p.num_kv_heads, b = flat / p.rows / p.num_kv_heads;
    }
};

// One lane's block: its sub-pages as table entries at `to` when it is full. False when an id or page is bad.
DEVICE bool fold_block(const FoldParams& f, const RowSpan& row, int h, int block, i32* to) {
    const PagedParams& p = f.paged;
    if (!block_in_length(p, row, block)) return false;
    const i64 first = i64(block) * p.kv_block_size;
    const i64 end = min(first + p.kv_block_size, i64(row.length));
    for (i64 token = first; token < end; token += f.sub_page) {
        int page = lookup_page(p, row, token / p.page_size);
        if (page < 0) return false;
        i64 entry = page * f.sub_pages_per_page + (i64(h) * p.page_size + token % p.page_size) / f.sub_page;
        if (to != nullptr) to[(token - first) / f.sub_page] = i32(entry);
    }
    return true;
}

// One warp lists a row's full blocks. Spare entries repeat one of the row's own sub-pages, because cuDNN reads
// its last 128-key tile whole and lets a NaN beyond the length through.
DEVICE void fold_table(const FoldParams& f, const FoldedRow& at, int lane) {
    const PagedParams& p = f.paged;
    i32* table = f.table + i64(blockIdx.x) * f.columns;
    const int per_block = p.kv_block_size / f.sub_page;
    int full = 0, cut = 0;      // blocks in the table, and tokens that the last of them lacks
    bool bad = false, tail = false;
    RowSpan row{};
    if (at.b < p.batch) row = resolve_row(p, at.b, at.h, at.r), bad = row.bad;
    for (int first = 0; first < row.count; first += 32) {
        const bool listed = first + lane < row.count;
        const int block = listed ? row.blocks[first + lane] : 0;
        const i64 past = (i64(block) + 1) * p.kv_block_size - row.length;
        const bool is_full = listed && block >= 0 && (f.tail_in_graph || past <= 0);
        if (is_full && past > 0) cut = i32(past);
        tail |= listed && !is_full;
        const u32 mask = __ballot_sync(~0u, is_full);
        const int slot = (full + __popc(mask & ((1u << lane) - 1))) * per_block;
        if (listed) bad |= !fold_block(f, row, at.h, block, is_full && slot + per_block <= f.columns ? table + slot : nullptr);
        full += __popc(mask);
    }
    bad = __any_sync(~0u, bad), tail = __any_sync(~0u, tail);
    full = bad ? 0 : min(full, f.columns / per_block);
    for (int other = 16; other > 0; other /= 2) cut = max(cut, __shfl_xor_sync(~0u, cut, other));
    cut = full > 0 ? min(cut, p.kv_block_size) : 0;
    __syncwarp();
    const int spare = full > 0 ? table[0] : 0;
    for (int i = full * per_block - cut / f.sub_page + lane; i < f.columns; i += 32) table[i] = spare;
    if (lane == 0) {
        f.seq_q[blockIdx.x] = f.packed_rows;
        f.seq_kv[blockIdx.x] = full * p.kv_block_size - cut;
        f.row_notes[blockIdx.x] = bad ? kBadRow : full | (tail ? kHasTail : 0);
    }
}

template <int D>
DEVICE void fold_row(const FoldParams& f) {
    const PagedParams& p = f.paged;
    const FoldedRow at(p);
    if (threadIdx.x < 32) fold_table(f, at, threadIdx.x);
    if (at.b >= p.batch) return;
    constexpr int kChunks = D / 8;      // 16 bytes of two-byte elements
    uint4* to = static_cast<uint4*>(f.q) + i64(blockIdx.x) * f.packed_rows * kChunks;
    const u16* from = static_cast<const u16*>(p.q) + at.b * p.q_stride_b;
    const int chunks = f.packed_rows * kChunks;
    for (int first = threadIdx.x; first < chunks; first += kFoldBatch * kFoldThreads) {
        uint4 chunk[kFoldBatch];
#pragma unroll
        for (int j = 0; j < kFoldBatch; ++j) {
            const int i = first + j * kFoldThreads, m = i / kChunks;
            const int token = at.r * p.q_block_size + u32(m) / u32(p.group), head = at.h * p.group + u32(m) % u32(p.group);
            chunk[j] = make_uint4(0, 0, 0, 0);
            if (i < chunks && token < p.seq_len_q)
                chunk[j] = *reinterpret_cast<const uint4*>(from + token * p.q_stride_t + head * p.q_stride_h + i % kChunks * 8);
        }
#pragma unroll
        for (int j = 0; j < kFoldBatch; ++j)
            if (first + j * kFoldThreads < chunks) to[first + j * kFoldThreads] = chunk[j];
    }
}

// Eight channels of cuDNN's part, `chunk`, and of the tail's part, merged by lse. What a part of lse -inf holds is not used.
template <typename T>
DEVICE uint4 merge_chunk(uint4 chunk, float lse_cudnn, const float* tail, float lse_tail) {
    if (lse_tail == NEG_INF) return chunk;
    float sum[8] = {}, part[8];
    const float top = fmaxf(lse_cudnn, lse_tail);
    const float weight_cudnn = lse_cudnn == NEG_INF ? 0.f : exp2_approx((lse_cudnn - top) * kLog2e);
    const float weight_tail = exp2_approx((lse_tail - top) * kLog2e);
    if (lse_cudnn != NEG_INF) {
        const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = weight_cudnn * to_float<T>(words[i / 2] >> (i % 2 * 16) & 0xffff);
    }
    load_floats(part, tail);
    const float scale = 1.f / (weight_cudnn + weight_tail);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = (sum[i] + weight_tail * part[i]) * scale;
    return make_uint4(pack2<T>(sum[0], sum[1]), pack2<T>(sum[2], sum[3]), pack2<T>(sum[4], sum[5]), pack2<T>(sum[6], sum[7]));
}

// Chunk i of a folded row: where it goes, and its two lse.
template <typename T, int D>
struct UnfoldedChunk {
    static constexpr int kChunks = D / 8;
    int token, head, column;
    i64 item;                   // of the tail's partial result
    float lse_cudnn;
    uint4 cudnn;

    DEVICE void load(const FoldParams& f, const FoldedRow& at, int i, bool full) {
        const PagedParams& p = f.paged;
        const int m = i / kChunks;
        token = at.r * p.q_block_size + u32(m) / u32(p.group), head = at.h * p.group + u32(m) % u32(p.group), column = i % kChunks * 8;
        item = (i64(at.b) * p.seq_len_q + token) * (p.num_kv_heads * p.group) + head;
        lse_cudnn = NEG_INF;
        if (!full || i >= f.packed_rows * kChunks) return;
        const i64 row = i64(blockIdx.x) * f.packed_rows;
        lse_cudnn = f.stats[row + m];
        cudnn = static_cast<const uint4*>(f.out)[row * kChunks + i];
    }

    DEVICE void store(const FoldParams& f, const FoldedRow& at, bool tail) const {
        const PagedParams& p = f.paged;
        if (token >= p.seq_len_q) return;
        const float lse_tail = tail ? p.partial_lse[item] : NEG_INF;
        const bool empty = lse_cudnn == NEG_INF && lse_tail == NEG_INF;
        const uint4 chunk = empty ? make_uint4(0, 0, 0, 0) : merge_chunk<T>(cudnn, lse_cudnn, p.partial_out + item * D + column, lse_tail);
        u16* out = static_cast<u16*>(p.out) + at.b * p.out_stride_b + token * p.out_stride_t + head * p.out_stride_h + column;
        *reinterpret_cast<uint4*>(out) = chunk;
        if (p.lse == nullptr || column != 0) return;
        const float top = fmaxf(lse_cudnn, lse_tail);
        const float sum = exp2_approx((lse_cudnn - top) * kLog2e) + exp2_approx((lse_tail - top) * kLog2e);
        p.lse[(i64(at.b) * p.num_kv_heads * p.group + head) * p.seq_len_q + token] = empty ? NEG_INF : top + log2_approx(sum) * kLn2;
    }
};

template <typename T, int D>
DEVICE void unfold_row(const FoldParams& f) {
    const FoldedRow at(f.paged);
    if (at.b >= f.paged.batch) return;
    const int notes = f.row_notes[blockIdx.x], chunks = f.packed_rows * (D / 8);
    const bool full = notes >= 0 && (notes & ~kHasTail) > 0;
    for (int first = threadIdx.x; first < chunks; first += kFoldBatch * kFoldThreads) {
        UnfoldedChunk<T, D> chunk[kFoldBatch];
#pragma unroll
        for (int j = 0; j < kFoldBatch; ++j) chunk[j].load(f, at, first + j * kFoldThreads, full);
#pragma unroll
        for (int j = 0; j < kFoldBatch; ++j)
            if (first + j * kFoldThreads < chunks) chunk[j].store(f, at, has_tail(notes));
    }
}
