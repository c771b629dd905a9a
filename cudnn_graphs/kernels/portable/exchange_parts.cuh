// Every rank's part of one attention sent to all ranks of a host and merged as it arrives: one kernel, no barrier, no fence.
//
// Each rank has two inboxes of one slot a rank: out T [items, D], and at slot_lse_offset float lse [items]. A word of an
// inbox is kEmpty until its data come, so data are their own flag; who read it empties it again. The inboxes take
// turns: who sends has received the whole run before, and its peers sent that after they emptied this inbox.
// A CTA counts its own turns, so a graph may be replayed any number of times; the grid of all runs is the same.
#pragma once
#include "common/launch_chain.cuh"
#include "portable/part_sum.cuh"

constexpr int kMaxRanks = 8, kExchangeWarps = 16;
constexpr u32 kEmpty = 0xffffffffu;         // as a float, or as two 16-bit elements: NaNs
constexpr u32 kGiveUp = 1u << 30;           // looks in vain, of about 0.6 us each: ten minutes, as torch.distributed waits

struct ExchangeParams {
    const u8* part;             // this rank's: out T [items, D], then float lse [batch, num_heads, seq_len]
    u32* turns;                 // [CTAs] runs so far
    void* out;                  // T, strides in elements
    float* lse;                 // [batch, num_heads, seq_len]; null: not wanted
    i64 lse_offset, slot_bytes, slot_lse_offset;
    i64 out_stride_b, out_stride_t, out_stride_h;
    u32 items, seq_len, num_heads, num_ranks, rank;
    u8* inboxes[kMaxRanks];     // of every rank, as this one sees them
};

// Each 32-bit word is written and read whole, by any GPU; no order among words is needed.
DEVICE void send(u8* to, const u32 (&x)[1]) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(x[0]) : "memory"); }
DEVICE void send(u8* to, const u32 (&x)[2]) { asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1]) : "memory"); }
template <int N>
DEVICE void send(u8* to, const u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"l"(to + 4 * i), "r"(x[i]), "r"(x[i + 1]), "r"(x[i + 2]), "r"(x[i + 3]) : "memory");
}

DEVICE void look(u32 (&x)[1], const u8* from) { asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x[0]) : "l"(from) : "memory"); }
DEVICE void look(u32 (&x)[2], const u8* from) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from) : "memory");
}
template <int N>
DEVICE void look(u32 (&x)[N], const u8* from) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3]) : "l"(from + 4 * i) : "memory");
}

// What may be sent: a NaN that reads as kEmpty becomes another one.
template <typename T, int N>
DEVICE void make_sendable(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (x[i] == kEmpty) x[i] = sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu;
}

// Waits for all N words and empties them. Ends the kernel with an error where a peer never sends.
template <int N>
DEVICE void receive(u32 (&x)[N], u8* from) {
    for (u32 looks = 0;; ++looks) {
        look(x, from);
        bool here = true;
#pragma unroll
        for (int i = 0; i < N; ++i) here &= x[i] != kEmpty;
        if (here) break;
        if (looks == kGiveUp) __trap();
    }
    u32 empty[N];
#pragma unroll
    for (int i = 0; i < N; ++i) empty[i] = kEmpty;
    send(from, empty);
}

template <typename T, int D>
class PartExchange {
public:
    explicit DEVICE PartExchange(const ExchangeParams& p) : p_(p), lane_(threadIdx.x % 32) {
        wait_for_launch_before();
        inbox_ = (p.turns[blockIdx.x] & 1) * p.num_ranks * p.slot_bytes;
    }

    DEVICE void run() const {
        const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);        // one for all lanes, as the compiler then knows
        const u32 first = blockIdx.x * kExchangeWarps + warp, step = gridDim.x * kExchangeWarps;
        for (u32 item = first; item < p_.items; item += step) send_item(item);
        for (u32 item = first; item < p_.items; item += step) merge_item(item);
        __syncthreads();
        if (threadIdx.x == 0) ++p_.turns[blockIdx.x];
    }

private:
    using Sum = PartSum<T, D>;
    const ExchangeParams& p_;
    u32 lane_;
    i64 inbox_;

    DEVICE u32 out_at(u32 item) const { return (item * D + lane_ * Sum::kPerLane) * u32(sizeof(T)); }
    DEVICE u8* slot(u32 of, u32 from) const { return p_.inboxes[of] + inbox_ + from * p_.slot_bytes; }
    DEVICE u32 own_lse(const ItemPlace<u32>& at) const { return *reinterpret_cast<const u32*>(p_.part + p_.lse_offset + 4 * at.lse_at); }

    DEVICE void send_item(u32 item) const {
        u32 words[Sum::kWords], lse[1] = {own_lse(ItemPlace<u32>(item, p_.seq_len, p_.num_heads))};
        load_words(words, p_.part + out_at(item));
        make_sendable<T>(words);
        make_sendable<float>(lse);
        for (u32 n = 1; n < p_.num_ranks; ++n) {
            const u32 peer = p_.rank + n;
            u8* to = slot(peer < p_.num_ranks ? peer : peer - p_.num_ranks, p_.rank);
            send(to + out_at(item), words);
            if (lane_ == 0) send(to + p_.slot_lse_offset + 4 * item, lse);
        }
    }

    DEVICE void merge_item(u32 item) const {
        const ItemPlace<u32> at(item, p_.seq_len, p_.num_heads);
        u32 mine[1] = {0xff800000u};                        // lane n has the lse of rank n
        if (lane_ == p_.rank) mine[0] = own_lse(at);
        else if (lane_ < p_.num_ranks) receive(mine, slot(p_.rank, lane_) + p_.slot_lse_offset + 4 * item);
        __syncwarp();
        float top = __uint_as_float(mine[0]);
        for (int other = kMaxRanks / 2; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
        Sum sum(__shfl_sync(~0u, top, 0));
        for (u32 n = 0; n < p_.num_ranks; ++n) {
            const float lse = __uint_as_float(__shfl_sync(~0u, mine[0], n));
            u32 words[Sum::kWords];
            if (n == p_.rank) load_words(words, p_.part + out_at(item));
            else receive(words, slot(p_.rank, n) + out_at(item));
            __syncwarp();
            sum.add(lse, words);
        }
        sum.store(static_cast<T*>(p_.out) + at.b * p_.out_stride_b + at.t * p_.out_stride_t + at.head * p_.out_stride_h + lane_ * Sum::kPerLane);
        if (p_.lse != nullptr && lane_ == 0) p_.lse[at.lse_at] = sum.lse();
    }
};
