// Between the parts of the shim; kernels see only simt.h.
#pragma once
#include <stddef.h>

#include "simt.h"

extern "C" {
// From entry.cpp, compiled with the kernel.
extern const unsigned simt_wave_size, simt_params_bytes;
void simt_call_kernel(const void* params);
// From scheduler.cpp.
void simt_switch(void** save_stack_pointer, void* to_stack_pointer);
void simt_lane_main();
}

namespace simt {

struct Job {
    u32 groups, group_size;
    unsigned long long seed;
    const void* params;
};
void run_job(const Job& job);

// Marks what the shim itself does to the kernel's memory as no business of the race detector's.
struct IgnoreRaces {
    IgnoreRaces();
    ~IgnoreRaces();
};

}  // namespace simt
