/* Appended to hip_library/hip.c: what ZLUDA and its probe call beside, and streams that are late.

   What is launched, copied or filled on a stream waits there until that stream is waited for, as
   it may on a card. So what went to another stream than the one that is waited for comes too late.
   ROCM_SD_FAKE_HIP_MORE says what else is to be otherwise. */

enum { MOST_WORK = 1 << 15, MOST_STREAMS = 16 };
enum { FILL = 1, COPY = 2, KERNEL = 3 };

struct Work { int kind; void *to; const void *from; size_t size; int value; struct Scale scale; };
static struct { struct Work work[MOST_WORK]; int count; } late[MOST_STREAMS];
static struct { const char *begin; size_t size; } allocated[1024];
static int allocated_count, current_device;

static int otherwise(const char *what) {
    const char *script = getenv("ROCM_SD_FAKE_HIP_MORE");
    return script && !strcmp(script, what);
}

static int add_work(hipStream_t stream, struct Work work) {
    if (stream && !is(STREAM, stream)) return last_error = hipErrorInvalidHandle;
    int number = stream ? stream->number % MOST_STREAMS : 0;
    late[number].work[late[number].count++ % MOST_WORK] = work;
    return hipSuccess;
}

static int launch_late(const void *code, size_t size, const char *entry, unsigned grid,
                       unsigned block, const void *arguments, size_t bytes, int stream) {
    (void)code, (void)size, (void)entry, (void)grid, (void)block, (void)bytes;
    struct Work work = {.kind = KERNEL, .scale = *(const struct Scale *)arguments};
    late[stream % MOST_STREAMS].work[late[stream % MOST_STREAMS].count++ % MOST_WORK] = work;
    return hipSuccess;
}

__attribute__((constructor)) static void be_late(void) { execute = launch_late; }

static void catch_up(int number) {
    for (int i = 0; i < late[number].count; i++) {
        struct Work *w = &late[number].work[i];
        if (w->kind == FILL)
            for (size_t n = 0; n < w->size; n++) ((int *)w->to)[n] = w->value;
        if (w->kind == COPY) memcpy(w->to, w->from, w->size);
        if (w->kind == KERNEL) scale(&w->scale);
    }
    late[number].count = 0;
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
    if (stream && !is(STREAM, stream)) return last_error = hipErrorInvalidHandle;
    return catch_up(stream ? stream->number % MOST_STREAMS : 0), hipSuccess;
}

hipError_t hipMemsetD32Async(void *to, int value, size_t count, hipStream_t stream) {
    struct Work work = {.kind = FILL, .to = to, .size = count, .value = value};
    return add_work(stream, work);
}

hipError_t hipMemcpyDtoHAsync(void *to, const void *from, size_t size, hipStream_t stream) {
    struct Work work = {.kind = COPY, .to = to, .from = from, .size = size};
    return add_work(stream, work);
}

/* Of an allocation only what `test_allocate` has given is known. */
void *test_allocate(size_t size) {
    void *pointer = aligned_alloc(256, (size + 255) / 256 * 256);
    memset(pointer, 0, size);
    allocated[allocated_count].begin = pointer;
    allocated[allocated_count++ % 1024].size = size;
    return pointer;
}

hipError_t hipMemGetAddressRange(void **begin, size_t *size, const char *pointer) {
    for (int i = 0; i < allocated_count; i++)
        if (pointer >= allocated[i].begin && pointer < allocated[i].begin + allocated[i].size) {
            *begin = (void *)allocated[i].begin, *size = allocated[i].size;
            return hipSuccess;
        }
    return last_error = hipErrorNotFound;
}

hipError_t hipGetDevice(int *device) {
    return *device = otherwise("another device") ? 1 : current_device, hipSuccess;
}
