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
        const int first = state<C>().first_tile;
        look_up_block(first);
        look_up_page(first);
        look_up_block(first + 1);
    }

    // Requests a tile into `stage`, and moves the two look-ups on; tiles in order. Always one cp.async group.
    DEVICE void load(int tile, int stage) {
        if (tile < state<C>().end_tile) request(stage);
        cp_async_commit();
        look_up_page(tile + 1);
        look_up_block(tile + 2);
    }

private:
    const PagedParams& p_;
    int block_;                         // of this lane's key in the tile whose page is looked up next
    int token_ = kHidden;               // of this lane's key in the tile that is requested next
    int page_;

    struct Place {
        int position;                   // in the row's list
        int in_block;
    };

    // This lane's key in every tile.
    static DEVICE int lane_key() { return threadIdx.x / 32 * C::kLoadKeys + threadIdx.x % C::kLoadKeys; }

    DEVICE Place place(int tile) const {
        const int size = p_.kv_block_size;
        if (size < C::kKeys) {
            const int shift = __ffs(size) - 1;
            return {tile * (C::kKeys >> shift) + (lane_key() >> shift), lane_key() & (size - 1)};
        }
        const int tiles = u32(size) / C::kKeys, position = tiles == 1 ? tile : u32(tile) / u32(tiles);
        return {position, (tile - position * tiles) * C::kKeys + lane_key()};
    }

    DEVICE bool listed(int tile, const Place& place) const { return tile < state<C>().end_tile && place.position < state<C>().row.count; }

    DEVICE const u32* bits_word() const { return p_.valid_bits + state<C>().tile.b * p_.valid_bits_stride + token_ / 32; }

    DEVICE void look_up_block(int tile) {
        const Place at = place(tile);
        if (listed(tile, at)) block_ = state<C>().row.blocks[at.position];
    }

    DEVICE void look_up_page(int tile) {
        token_ = kHidden;
        const Place at = place(tile);
        if (!listed(tile, at)) return;
        const RowSpan& row = state<C>().row;
        if (!block_in_length(p_, row, block_)) {
            state<C>().row.bad = true;
            return;
        }
        const i64 token = i64(block_) * p_.kv_block_size + at.in_block;
        if (token >= row.length) return;
        token_ = int(token);
        const int logical = token_ >> (__ffs(p_.page_size) - 1);
        page_ = logical < row.page_count ? row.pages[logical] : -1;
        if constexpr (C::kBits) prefetch_l1(bits_word());     // no register is free to hold it until then
    }

    DEVICE void request(int stage) {
        bool seen = token_ <= state<C>().highest_limit;
        if (token_ != kHidden && (page_ < 0 || page_ >= p_.num_pages)) {
            state<C>().row.bad = true;
            seen = false;
        }
        if constexpr (C::kBits) seen = seen && (*bits_word() >> (token_ & 31) & 1);
        const i64 slot = i64(state<C>().tile.h) * p_.page_size + (token_ & (p_.page_size - 1));
        publish(stage, seen ? token_ : kHidden);
        copy(stage, seen ? page_ * p_.kv_page_stride + slot * C::kD : -1);
    }

    // What the masks need to know of this warp's keys.
    DEVICE void publish(int stage, int token) {
        const int lowest = __reduce_min_sync(~0u, token), highest = __reduce_max_sync(~0u, token);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane < C::kLoadKeys) reinterpret_cast<int*>(shared_memory + C::kTokens)[stage * C::kKeys + lane_key()] = token;
        if (lane == 0) reinterpret_cast<int2*>(shared_memory + C::kSpans)[stage * C::kWarps + warp] = make_int2(lowest, highest);
    }

    // Keys that nobody sees become zeros without being read: 0 x NaN would reach the output.
    DEVICE void copy(int stage, i64 at) {
        constexpr int kStep = 32 / C::kChunks;      // keys that a warp copies at once
        const int lane = threadIdx.x % 32, chunk = lane % C::kChunks;
        const u32 to = smem_address(shared_memory) + stage * C::kTileBytes + swizzled<C>(threadIdx.x / 32 * C::kLoadKeys + lane / C::kChunks, chunk);
        const auto* k = static_cast<const typename C::T*>(p_.k) + chunk * 8;
        const auto* v = static_cast<const typename C::T*>(p_.v) + chunk * 8;
        // Mostly the warp's keys are neighbours in one page: no address has to be fetched from another lane.
        if (min(p_.kv_block_size, p_.page_size) >= C::kLoadKeys && __all_sync(~0u, at >= 0)) {
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
