// Launches of one stream that overlap (programmatic dependent launch, SM90 and later): a kernel launched `early`
// (runtime/launch.py) may start while the launch before it runs, and waits for its end itself.
#pragma once
#include "common/types.cuh"

// Returns when the launch before has ended and what it wrote can be read; at once in a kernel that was not launched early.
// Whatever an earlier launch of the same run writes or reads is touched only after it.
DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A launch that follows early may start once every CTA has said this or ended.
DEVICE void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
