/* ZLUDA's nvcuda as far as torch's side and the probe need it, above the HIP it is linked to.

   With BOXED a CUstream is an object of its own, as in lshqqytiger/ZLUDA 3.x; without it, HIP's,
   as from vosen/ZLUDA 4 on. VERSION is what it reports. ROCM_SD_FAKE_ZLUDA plants a mistake. */

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef struct Stream *hipStream_t;

int hipStreamCreateWithFlags(hipStream_t *, unsigned);
int hipStreamSynchronize(hipStream_t);
int hipMemsetD32Async(void *, int, size_t, hipStream_t);
int hipMemcpyDtoHAsync(void *, const void *, size_t, hipStream_t);
int hipMemGetAddressRange(void **, size_t *, const char *);
void *test_allocate(size_t);

enum { COOKIE = 0x512097, INVALID_HANDLE = 400 };
struct Box { uint64_t cookie; hipStream_t base; };

static int planted(const char *what) {
    const char *script = getenv("ROCM_SD_FAKE_ZLUDA");
    return script && !strcmp(script, what);
}

/* Handles 0 and 1 are the default stream, as CUDA has it. */
static int opened(uint64_t handle, hipStream_t *stream) {
#ifdef BOXED
    struct Box *box = (void *)handle;
    *stream = NULL;
    if (handle < 2) return 0;
    if (box->cookie != COOKIE) return INVALID_HANDLE;
    *stream = box->base;
#else
    *stream = (hipStream_t)handle;
#endif
    return 0;
}

CUresult cuDriverGetVersion(int *version) {
    if (planted("crash")) raise(SIGSEGV);
    if (planted("exit")) _exit(7);
    if (planted("kill")) raise(SIGKILL);
    while (planted("hang")) pause();
    return *version = VERSION, 0;
}

CUresult cuStreamCreate(uint64_t *handle, unsigned flags) {
    hipStream_t base = NULL;
    int status = hipStreamCreateWithFlags(&base, flags);
#ifdef BOXED
    struct Box *box = malloc(sizeof *box);
    box->cookie = COOKIE, box->base = base;
    *handle = (uint64_t)box;
#else
    *handle = (uint64_t)base;
#endif
    return status;
}

CUresult cuStreamSynchronize(uint64_t handle) {
    hipStream_t stream;
    int status = opened(handle, &stream);
    return status ? status : hipStreamSynchronize(stream);
}

CUresult cuMemAlloc_v2(uint64_t *address, size_t size) {
    return *address = (uint64_t)test_allocate(size), 0;
}

CUresult cuMemGetAddressRange_v2(uint64_t *begin, size_t *size, uint64_t address) {
    int status = hipMemGetAddressRange((void **)begin, size, (const char *)address);
    if (planted("another range")) *begin += 4096;
    return status;
}

CUresult cuMemsetD32Async(uint64_t to, int value, size_t count, uint64_t handle) {
    hipStream_t stream;
    int status = opened(handle, &stream);
    return status ? status : hipMemsetD32Async((void *)to, value, count, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, uint64_t handle) {
    hipStream_t stream;
    int status = opened(handle, &stream);
    return status ? status : hipMemcpyDtoHAsync(to, (const void *)from, size, stream);
}

#ifdef BOXED
struct Object { int code; uint64_t value; };

struct Object zluda_get_hip_object(uint64_t object, int kind) {
    struct Object answer = {0, 0};
    hipStream_t stream;
    if (kind != 1) answer.code = 1;
    if (planted("not translated") || answer.code) return answer;
    answer.code = opened(object, &stream);
    answer.value = (uint64_t)stream;
    return answer;
}
#endif
