// The loader warps: they gather the keys and values that a step names, and an item's queries, into the layout
// of wgmma: columns of 64 channels, 64 rows of 128 bytes each under the 128-byte swizzle.
//
// cp.async rather than the bulk copy engine: a block is four rows in four columns of the tile, which would be
// four boxes of 512 bytes each; and a token that no query attends is a copy of length 0, so zeros.
#pragma once
#include "sm90/qsa_plan.cuh"

// This thread arrives once its copies so far are in shared memory. The barrier has counted it.
DEVICE void arrive_when_copied(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&barrier)) : "memory");
}

template <typename Plan>
struct Loader {
    const QsaParams& p;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 - Plan::kConsumerWarps - 1;
    u32 items = 0;

    DEVICE Loader(const QsaParams& params) : p(params) {}

    static DEVICE StepNotes<Plan>& notes_of(u32 step) { return qsa_memory<Plan>().steps[slot_of<Plan::kSteps>(step)]; }

    // In the order in which the consumers use and free slots: the values of a step come after the keys of the next.
    DEVICE void run() {
        for (u32 step = 0;; ++step) {
            const StepNotes<Plan>& notes = notes_of(step);
            barrier_wait(qsa_memory<Plan>().step_full[slot_of<Plan::kSteps>(step)], trip_of<Plan::kSteps>(step));
            const u32 flags = notes.flags;
            if (!(flags & kNoMoreWork)) load_keys(notes, step);
            if (step > 0) load_values(notes_of(step - 1), step - 1);
            if (flags & kNoMoreWork) break;
            if (flags & kFirstStep) load_queries(notes.item / p.num_kv_heads * Plan::kQueries, notes.item % p.num_kv_heads);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    }

    DEVICE void load_keys(const StepNotes<Plan>& notes, u32 step) {
        QsaUnionMemory<Plan>& memory = qsa_memory<Plan>();
        const u32 slot = slot_of<Plan::kStages>(step);
        barrier_wait(memory.keys_empty[slot], trip_of<Plan::kStages>(step) ^ 1);
        gather(notes, p.k + notes.item % p.num_kv_heads * kQsaDim, memory.keys[slot]);
        arrive_when_copied(memory.keys_full[slot]);
    }

    // The last use of a step's notes here.
    DEVICE void load_values(const StepNotes<Plan>& notes, u32 step) {
        QsaUnionMemory<Plan>& memory = qsa_memory<Plan>();
        const u32 slot = slot_of<Plan::kStages>(step);
        barrier_wait(memory.values_empty[slot], trip_of<Plan::kStages>(step) ^ 1);
        gather(notes, p.v + notes.item % p.num_kv_heads * kQsaDim, memory.values[slot]);
        arrive_when_copied(memory.values_full[slot]);
        __syncwarp();
        if (lane == 0) barrier_arrive(memory.step_empty[slot_of<Plan::kSteps>(step)]);
    }

    // One copy instruction moves one column of a block, 4 rows x 128 bytes, so that a block costs one address and
    // four instructions that differ by constants. (A row of 512 bytes each took 28 instructions a copy.)
    DEVICE void gather(const StepNotes<Plan>& notes, const u16* head, u8* tile) {
        const int token = lane / 8, chunk = lane % 8;
        const i64 stride = i64(p.num_kv_heads) * kQsaDim;
        const u16* from = head + token * stride + chunk * 8;
        const u32 to = smem_address(tile) + token * 128 + (chunk ^ token) * 16;
        const u64 seen = notes.seen >> bit_of_key(token);
#pragma unroll 2
        for (int b = warp; b < Plan::kBlocks; b += Plan::kLoaderWarps) {
            const bool wanted = seen >> bit_of_key(kQsaBlock * b) & 1;
            const u16* row = from + notes.first[b] * stride;
            const u32 place = (to + b * 512) ^ (b & 1) * 64;        // the swizzle of rows 4 to 7 of eight
#pragma unroll
            for (int c = 0; c < Plan::kColumns; ++c) cp_async16(place + c * Plan::kColumnBytes, row + c * 64, wanted);
        }
    }

    // Queries times the sign of the scale. Rows without a query are zeros.
    DEVICE void load_queries(int t0, int h) {
        QsaUnionMemory<Plan>& memory = qsa_memory<Plan>();
        barrier_wait(memory.queries_empty, ~items++ & 1);
        const bool plain = p.q_factor == 0x3f803f80u;
        const int chunk = lane % 8;
#pragma unroll 2
        for (int four = warp; four < 2 * 16; four += Plan::kLoaderWarps) {      // rows 4 four .. of both warpgroups
            const int row = four * 4 + lane / 8, m = row % 64, query = m / Plan::kGroup, t = t0 + row / 64 * Plan::kWgQueries + query;
            const bool exists = query < Plan::kWgQueries && t < p.num_tokens;
            const i64 head = exists ? (i64(t) * p.num_kv_heads + h) * Plan::kGroup + m % Plan::kGroup : 0;
            const u16* from = p.q + head * kQsaDim + chunk * 8;
            const u32 place = smem_address(memory.queries) + row / 64 * Plan::kTileBytes + m * 128 + ((chunk ^ m) & 7) * 16;
#pragma unroll
            for (int c = 0; c < Plan::kColumns; ++c) {
                if (plain) cp_async16(place + c * Plan::kColumnBytes, from + c * 64, exists);
                else store_signed(place + c * Plan::kColumnBytes, from + c * 64, exists);
            }
        }
        if (plain) arrive_when_copied(memory.queries_full);
        else barrier_arrive(memory.queries_full);
    }

    DEVICE void store_signed(u32 place, const u16* from, bool exists) {
        uint4 x = exists ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
        x = {qsa_signed_query(x.x, p.q_factor), qsa_signed_query(x.y, p.q_factor), qsa_signed_query(x.z, p.q_factor), qsa_signed_query(x.w, p.q_factor)};
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
    }
};
