// Which query rows one CTA has: rows m are tokens x heads of one sparse row, heads fastest, because the
// heads of a group share its keys.
#pragma once
#include "common/paged_params.cuh"
#include "common/ptx.cuh"
#include "portable/paged_config.cuh"

struct QueryTile {
    int b, h, r;                // request, KV head, sparse row
    int split;
    int first;                  // of this tile, among the rows of the sparse row
    int count;                  // rows of this tile that exist, <= 0: none
    int first_token;            // of the sparse row

    template <typename C>
    static DEVICE int tiles_of_row(const PagedParams& p) { return ceil_div(min(p.q_block_size, p.seq_len_q) * p.group, C::kRows); }

    // x = ((b * num_kv_heads + h) * rows + r) * m_tiles + m_tile: CTAs that run together share a KV head.
    template <typename C>
    static DEVICE QueryTile of(const PagedParams& p, int x, int split) {
        QueryTile tile;
        const int m_tiles = tiles_of_row<C>(p);
        tile.first = x % m_tiles * C::kRows;
        x /= m_tiles;
        tile.r = x % p.rows;
        x /= p.rows;
        tile.h = x % p.num_kv_heads;
        tile.b = x / p.num_kv_heads;
        tile.split = split;
        tile.first_token = tile.r * p.q_block_size;
        tile.count = min(C::kRows, min(p.q_block_size, p.seq_len_q - tile.first_token) * p.group - tile.first);
        return tile;
    }

    DEVICE int token(const PagedParams& p, int m) const { return first_token + u32(first + m) / u32(p.group); }
    DEVICE int head(const PagedParams& p, int m) const { return h * p.group + u32(first + m) % u32(p.group); }

    // The last key that row m may see. Causal is aligned to the live length's end.
    template <typename C>
    DEVICE int limit(const PagedParams& p, int length, int m) const {
        return C::kCausal ? length - p.seq_len_q + token(p, m) : length - 1;
    }

    // Q of the tile to shared memory, rows that do not exist as zeros. One cp.async group.
    template <typename C>
    DEVICE void load(const PagedParams& p) const {
        const auto* q = static_cast<const typename C::T*>(p.q) + b * p.q_stride_b;
#pragma unroll 4
        for (int i = threadIdx.x; i < C::kRows * C::kChunks; i += C::kThreads) {
            const int m = i / C::kChunks, chunk = i % C::kChunks;
            const bool exists = m < count;
            const i64 from = exists ? token(p, m) * p.q_stride_t + head(p, m) * p.q_stride_h + chunk * 8 : 0;
            cp_async16(smem_address(shared_memory) + C::kQ + swizzled<C>(m, chunk), q + from, exists);
        }
        cp_async_commit();
    }
};
