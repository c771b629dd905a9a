// From a row's block list to key tiles in shared memory. Tile n holds keys n * kKeys and following of the
// concatenated blocks, so several small blocks share a tile and a large one fills several.
//
// Each warp loads kLoadKeys keys of every tile, and a lane looks up one of them: block id, then page, then
// address. Each step of that chain is a dependent load of some 600 cycles, so they run in three successive
// tiles: while tile n's bytes are requested, tile n + 1's page and tile n + 2's id are.
#pragma once
#include "common/paged_params.cuh"
#include "common/ptx.cuh"
#include "portable/cta_state.cuh"
#include "portable/paged_config.cuh"

template <typename C>
class KeyGather {
public:
    explicit DEVICE KeyGather(const PagedParams& p) : p_(p) {
        const GatherState row = gather_state<C>();
        const int first = state<C>().first_tile;
        look_up_block(row, first);
        look_up_page(row, first);
        look_up_block(row, first + 1);
    }

    // Requests a tile into `stage`, and moves the two look-ups on; tiles in order. Always one cp.async group.
    DEVICE void load(int tile, int stage) {
        const GatherState row = gather_state<C>();
        if (tile < row.end_tile) request(row, stage);
        cp_async_commit();
        look_up_page(row, tile + 1);
        look_up_block(row, tile + 2);
    }

private:
    const PagedParams& p_;
    int block_ = 0;                     // of this lane's key in the tile whose page is looked up next
    int token_ = kHidden;               // of this lane's key in the tile that is requested next
    int page_ = -1;

    struct Place {
        int position;                   // in the row's list
        int in_block;
        bool listed;
    };

    // This lane's key in every tile.
    static DEVICE int lane_key() { return threadIdx.x / 32 * C::kLoadKeys + threadIdx.x % C::kLoadKeys; }

    // A block is a part of a tile, or several tiles.
    DEVICE Place place(const GatherState& row, int tile) const {
        constexpr int kShift = log2_of(C::kKeys);
        const int shift = min(__ffs(p_.kv_block_size) - 1, kShift), tiles = u32(p_.kv_block_size) >> kShift;
        const int block = tiles <= 1 ? tile : u32(tile) / u32(tiles);
        Place at;
        at.position = (block << (kShift - shift)) + (lane_key() >> shift);
        at.in_block = (tiles <= 1 ? 0 : (tile - block * tiles) * C::kKeys) + (lane_key() & ((1 << shift) - 1));
        at.listed = tile < row.end_tile && at.position < row.count;
        return at;
    }

    DEVICE void look_up_block(const GatherState& row, int tile) {
        const Place at = place(row, tile);
        if (at.listed) block_ = row.blocks[at.position];
    }

    DEVICE void look_up_page(const GatherState& row, int tile) {
        const Place at = place(row, tile);
        const i64 first = i64(block_) * p_.kv_block_size, token = first + at.in_block;
        const bool exists = block_ >= 0 && first < row.length;
        if (at.listed && !exists) state<C>().row.bad = true;
        const bool selected = at.listed && exists && token < row.length;
        const int logical = int(token) >> (__ffs(p_.page_size) - 1);
        token_ = selected ? int(token) : kHidden;
        page_ = -1;
        if (selected && logical < row.page_count) page_ = row.pages[logical];
        if constexpr (C::kBits)
            if (selected) prefetch_l1(bits_word(row));       // no register is free to hold it until then
    }

    DEVICE const u32* bits_word(const GatherState& row) const { return p_.valid_bits + row.b * p_.valid_bits_stride + token_ / 32; }

    DEVICE void request(const GatherState& row, int stage) {
        const bool missing = token_ != kHidden && (page_ < 0 || page_ >= p_.num_pages);
        if (missing) state<C>().row.bad = true;
        bool seen = token_ <= row.highest_limit && !missing;
        if constexpr (C::kBits) seen = seen && (*bits_word(row) >> (token_ & 31) & 1);
        const int slot = row.h * p_.page_size + (token_ & (p_.page_size - 1));
        const bool all = publish(stage, seen ? token_ : kHidden);
        copy(stage, seen ? page_ * p_.kv_page_stride + i64(slot) * C::kD : -1, all);
    }

    // What the masks need to know of this warp's keys. Returns whether every one of them is seen.
    DEVICE bool publish(int stage, int token) {
        int lowest, highest;
        if constexpr (C::kCausal) {
            lowest = __reduce_min_sync(~0u, token);
            highest = __reduce_max_sync(~0u, token);
        } else {        // seen or not is all that matters, and a vote is quicker
            lowest = __any_sync(~0u, token != kHidden) ? 0 : kHidden;
            highest = __all_sync(~0u, token != kHidden) ? 0 : kHidden;
        }
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane < C::kLoadKeys) reinterpret_cast<int*>(shared_memory + C::kTokens)[stage * C::kKeys + lane_key()] = token;
        if (lane == 0) reinterpret_cast<int2*>(shared_memory + C::kSpans)[stage * C::kWarps + warp] = make_int2(lowest, highest);
        return highest != kHidden;
    }

    // Keys that nobody sees become zeros without being read: 0 x NaN would reach the output.
    DEVICE void copy(int stage, i64 at, bool all) {
        constexpr int kStep = 32 / C::kChunks;      // keys that a warp copies at once
        const int lane = threadIdx.x % 32, chunk = lane % C::kChunks;
        const u32 to = smem_address(shared_memory) + stage * C::kTileBytes + swizzled<C>(threadIdx.x / 32 * C::kLoadKeys + lane / C::kChunks, chunk);
        const auto* k = static_cast<const typename C::T*>(p_.k) + chunk * 8;
        const auto* v = static_cast<const typename C::T*>(p_.v) + chunk * 8;
        // Mostly the warp's keys are neighbours in one page: no address has to be fetched from another lane.
        if (min(p_.kv_block_size, p_.page_size) >= C::kLoadKeys && all) {
            const i64 from = at - lane % C::kLoadKeys * C::kD + lane / C::kChunks * C::kD;
#pragma unroll
            for (int key = 0; key < C::kLoadKeys; key += kStep) {
                cp_async16((to + C::kK ^ (key & 7) << 4) + key * C::kRowBytes, k + from + key * C::kD);
                cp_async16((to + C::kV ^ (key & 7) << 4) + key * C::kRowBytes, v + from + key * C::kD);
            }
            return;
        }
#pragma unroll
        for (int key = 0; key < C::kLoadKeys; key += kStep) {
            const i64 from = __shfl_sync(~0u, at, key + lane / C::kChunks);
            const bool seen = from >= 0;
            cp_async16((to + C::kK ^ (key & 7) << 4) + key * C::kRowBytes, k + (seen ? from : 0), seen);
            cp_async16((to + C::kV ^ (key & 7) << 4) + key * C::kRowBytes, v + (seen ? from : 0), seen);
        }
    }
};
