// The program: reads a job from standard input, runs it, writes the buffers to standard output. All numbers are little endian u64:
//   groups, group size, seed, bytes of the params, number of buffers, number of pointers
//   bytes of each buffer
//   for each pointer: its offset in the params, the buffer that it points into, the offset there
//   the params; the contents of each buffer
// Each buffer is an allocation of exactly its size, aligned to 64 bytes as torch's are.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime.h"

typedef unsigned long long u64;

static void read_all(void* to, u64 bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) simt::fail("the job on standard input ends early");
}
static u64 read_number() {
    u64 x;
    read_all(&x, sizeof x);
    return x;
}

int main() {
    const u64 groups = read_number(), group_size = read_number(), seed = read_number();
    const u64 params_bytes = read_number(), buffer_count = read_number(), pointer_count = read_number();
    if (params_bytes != simt_params_bytes)
        simt::fail("the kernel's parameters have %u bytes, %llu were given", simt_params_bytes, params_bytes);
    u64* sizes = (u64*)malloc(sizeof(u64) * (buffer_count + 1));
    char** buffers = (char**)malloc(sizeof(char*) * (buffer_count + 1));
    for (u64 i = 0; i < buffer_count; ++i) sizes[i] = read_number();
    u64* pointers = (u64*)malloc(sizeof(u64) * 3 * (pointer_count + 1));
    for (u64 i = 0; i < 3 * pointer_count; ++i) pointers[i] = read_number();
    char* params = (char*)aligned_alloc(64, (params_bytes + 63) / 64 * 64);
    read_all(params, params_bytes);
    for (u64 i = 0; i < buffer_count; ++i) {
        if (posix_memalign((void**)&buffers[i], 64, sizes[i] ? sizes[i] : 1)) simt::fail("no memory for a buffer");
        read_all(buffers[i], sizes[i]);
    }
    for (u64 i = 0; i < pointer_count; ++i) {
        const char* address = buffers[pointers[3 * i + 1]] + pointers[3 * i + 2];
        memcpy(params + pointers[3 * i], &address, sizeof address);
    }
    simt::run_job({(simt::u32)groups, (simt::u32)group_size, seed, params});
    for (u64 i = 0; i < buffer_count; ++i)
        if (fwrite(buffers[i], 1, sizes[i], stdout) != sizes[i]) simt::fail("cannot write the results");
    fflush(stdout);
    _exit(0);
}
