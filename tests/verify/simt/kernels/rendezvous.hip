// Right and wrong ways of meeting, and of using memory: CASE chooses.
#include "common/platform.h"

enum {
    kExchange,          // right: write LDS, barrier, read what another wave wrote
    kNoBarrier,         // the same without the barrier
    kHalfWaveReturns,   // half a wave returns, the rest waits at the barrier
    kOneWaveReturns,    // a whole wave returns, the others wait at the barrier
    kTwoBarriers,       // the waves wait at two different barriers
    kDivergentShuffle,  // half a wave takes part in a cross-lane move
    kTwoShuffles,       // the halves of a wave wait at two different moves
    kLdsPoison,         // reads LDS that nobody wrote
    kLdsOverflow,       // writes one word past the end of LDS
    kLdsSizes,          // work-items disagree about the size of LDS
    kGlobalOverflow,    // reads one word past the end of a buffer
    kGroupsCollide,     // work-groups write to the same word
    kWithinWave,        // right: lanes of one wave exchange through LDS with a wave barrier
    kNoWaveBarrier,     // the same without the wave barrier
    kEndless,           // never ends
    kVote,              // right: a barrier at which one work-item says yes, then one at which none does
    kTwoFunctions,      // the halves of a wave exchange floats in two different functions
};

struct RendezvousParams {
    const u32* x;  // one word per work-item of the grid
    u32* out;      // the same
};

DEVICE float others(float x) { return lane_xor<1>(x); }
DEVICE float others_too(float x) { return lane_xor<1>(x) + 1; }

DEVICE void exchange(const RendezvousParams& p, u32* memory, u32 partner, bool wait) {
    const u32 id = thread_id(), i = block_id() * THREADS + id;
    memory[id] = p.x[i];
    if (wait) barrier();
    p.out[i] = memory[partner];
}

KERNEL(THREADS) rendezvous(RendezvousParams p) {
    const u32 id = thread_id(), i = block_id() * THREADS + id, wave = id / WAVE_SIZE;
    LDS(bytes, CASE == kLdsSizes && id ? 8 : THREADS * 4);
    u32* memory = (u32*)bytes;
    if constexpr (CASE == kExchange || CASE == kNoBarrier) exchange(p, memory, (id + WAVE_SIZE) % THREADS, CASE == kExchange);
    if constexpr (CASE == kHalfWaveReturns || CASE == kOneWaveReturns) {
        if (CASE == kHalfWaveReturns ? id % WAVE_SIZE < WAVE_SIZE / 2 : wave == 0) return;
        barrier();
    }
    if constexpr (CASE == kTwoBarriers) {
        if (wave == 0) {
            barrier();
            memory[0] = 1;
        } else {
            memory[1] = 1;
            barrier();
        }
    }
    if constexpr (CASE == kDivergentShuffle) {
        if (id % 2) p.out[i] = lane_xor<1>(p.x[i]);
    }
    if constexpr (CASE == kTwoShuffles) {
        if (id % 2) p.out[i] = __builtin_amdgcn_ds_bpermute((int)(4 * (id ^ 1)), (int)p.x[i]);
        else p.out[i] = 1 + __builtin_amdgcn_ds_bpermute((int)(4 * (id ^ 3)), (int)p.x[i]);
    }
    if constexpr (CASE == kTwoFunctions) p.out[i] = (u32)(id % 2 ? others((float)p.x[i]) : others_too((float)p.x[i]));
    if constexpr (CASE == kLdsPoison) p.out[i] = memory[id];
    if constexpr (CASE == kLdsOverflow) memory[id + 1] = 0, p.out[i] = memory[id];
    if constexpr (CASE == kGlobalOverflow) p.out[i] = p.x[i + 1];
    if constexpr (CASE == kGroupsCollide) p.out[id] = p.x[i];
    if constexpr (CASE == kWithinWave || CASE == kNoWaveBarrier) {
        memory[id] = p.x[i];
        if (CASE == kWithinWave) __builtin_amdgcn_wave_barrier();
        p.out[i] = memory[id ^ 1];
    }
    if constexpr (CASE == kVote) {
        const bool some = simt::barrier_any(id == 5);
        p.out[i] = (u32)some + 2 * (u32)simt::barrier_any(false);
    }
    if constexpr (CASE == kEndless)
        for (;;) barrier();
}
