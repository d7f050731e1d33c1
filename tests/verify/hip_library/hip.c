/* The part of the HIP runtime's C interface that lib_rocm_sd calls, as AMD declares it, strict.

   Every argument is looked at as the callee receives it. What a driver would crash on, or take
   for something else, becomes a line of `complaints`; what it would refuse becomes its status:
   that of HIP 5.7.1, with which tests/real_hip/test_call_by_call.py compares each.
   Launches are handed to a function of the test's, which may execute them. Not thread-safe.

   A process that no test reaches is told by ROCM_SD_FAKE_HIP what to do: it executes tests/data's
   `scale` on host memory, and at its launch number N does as "HOW:N" says (see `misbehave`). */

#include <elf.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int hipError_t;
typedef struct Module *hipModule_t;
typedef struct Function *hipFunction_t;
typedef struct Stream *hipStream_t;

enum {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidConfiguration = 9,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidKernelFile = 218,
    hipErrorSharedObjectInitFailed = 303,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorLaunchOutOfResources = 701,
    MOST_WORK_ITEMS = 1024, MACHINE_AMDGPU = 224, ABI_HSA = 64, MOST_HANDLES = 65536,
    MODULE = 1, FUNCTION = 2, STREAM = 3,
};

#define HIP_LAUNCH_PARAM_BUFFER_POINTER ((void *)0x01)
#define HIP_LAUNCH_PARAM_BUFFER_SIZE ((void *)0x02)
#define HIP_LAUNCH_PARAM_END ((void *)0x03)

/* The image is referred to, not copied, as a runtime may: its owner has to keep it unchanged. */
struct Module { const unsigned char *image; size_t size; uint64_t sum; };
struct Function { hipModule_t module; char name[256]; uint32_t kernarg; };
struct Stream { int number; };

typedef int (*execute_t)(const void *code, size_t size, const char *entry, unsigned grid,
                         unsigned block, const void *arguments, size_t bytes, int stream);

static char notes[1 << 20], complaints[1 << 16], fail_call[64];
static int fail_status, last_error, machine, streams;
static execute_t execute;
static struct { int kind; const void *pointer; } handles[MOST_HANDLES];
static int handle_count;

/* Handles lie above 4 GiB, and one is looked for among those given out before it is used. */
static void *made(int kind, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    handles[handle_count % MOST_HANDLES].kind = kind;
    handles[handle_count++ % MOST_HANDLES].pointer = pointer;
    return pointer;
}

static int is(int kind, const void *pointer) {
    for (int i = 0; i < handle_count && i < MOST_HANDLES; i++)
        if (handles[i].kind == kind && handles[i].pointer == pointer) return 1;
    return 0;
}

static void add(char *to, size_t most, const char *format, va_list values) {
    size_t used = strlen(to);
    vsnprintf(to + used, most - used, format, values);
}

static void note(const char *format, ...) {
    va_list values;
    va_start(values, format);
    add(notes, sizeof notes, format, values);
    va_end(values);
}

static int complain(const char *format, ...) {
    va_list values;
    va_start(values, format);
    add(complaints, sizeof complaints, format, values);
    va_end(values);
    return last_error = hipErrorInvalidValue;
}

static int failing(const char *call) {
    if (strcmp(call, fail_call)) return 0;
    *fail_call = 0;
    return last_error = fail_status;
}

/* For the test */

const char *test_notes(void) {
    static char out[sizeof notes];
    memcpy(out, notes, sizeof notes);
    *notes = 0;
    return out;
}

const char *test_complaints(void) {
    static char out[sizeof complaints];
    memcpy(out, complaints, sizeof complaints);
    *complaints = 0;
    return out;
}

void test_fail(const char *call, int status) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_status = status;
}

/* The low byte of a code object's flags that this device takes; 0 takes any. */
void test_set_machine(int value) { machine = value; }

void test_set_executor(execute_t function) { execute = function; }

int test_last_error(void) { return last_error; }

hipStream_t test_stream(void) {
    hipStream_t stream = made(STREAM, sizeof *stream);
    stream->number = ++streams;
    return stream;
}

/* Memory, and what a script says */

enum { FREE_BYTES = 1 << 30 };
static int launches, allocations, sticky;

static int scripted(const char *how, int number) {
    const char *script = getenv("ROCM_SD_FAKE_HIP");
    size_t length = strlen(how);
    return script && !strncmp(script, how, length) && script[length] == ':' &&
           atoi(script + length + 1) == number;
}

static int status(int code) { return code ? last_error = code : hipSuccess; }

hipError_t hipSetDevice(int index) { return status(index ? hipErrorInvalidDevice : 0); }

static int version(int *to) {
    if (!to) return status(hipErrorInvalidValue);
    return *to = 60443483, hipSuccess;
}

hipError_t hipDriverGetVersion(int *to) { return version(to); }
hipError_t hipRuntimeGetVersion(int *to) { return version(to); }
hipError_t hipDeviceSynchronize(void) { return status(sticky); }

static struct { char *at; size_t size; } blocks[MOST_HANDLES];

/* The block that has this byte, -1 where none has. */
static int block_of(const void *pointer) {
    for (int i = 0; i < MOST_HANDLES; i++)
        if (blocks[i].at && (size_t)((char *)pointer - blocks[i].at) < blocks[i].size) return i;
    return -1;
}

static int is_beyond(int block, const void *pointer, size_t size) {
    return block >= 0 && size > blocks[block].size - (size_t)((char *)pointer - blocks[block].at);
}

hipError_t hipMalloc(void **pointer, size_t size) {
    if (!pointer) return status(hipErrorInvalidValue);
    int i = 0;
    while (i < MOST_HANDLES && blocks[i].at) i++;
    if (scripted("oom", ++allocations) || size > FREE_BYTES || i == MOST_HANDLES)
        return status(hipErrorOutOfMemory);
    *pointer = size ? aligned_alloc(256, (size + 255) / 256 * 256) : NULL;
    blocks[i].at = *pointer;
    blocks[i].size = size;
    return sticky;
}

hipError_t hipFree(void *pointer) {
    int block = block_of(pointer);
    if (pointer && (block < 0 || blocks[block].at != pointer)) return status(hipErrorInvalidValue);
    if (pointer) blocks[block].at = NULL;
    return free(pointer), sticky;
}

hipError_t hipMemset(void *to, int value, size_t size) {
    int block = block_of(to);
    if (size && (block < 0 || is_beyond(block, to, size))) return status(hipErrorInvalidValue);
    return size ? memset(to, value, size) : NULL, sticky;
}

/* HIP takes any direction, and finds by the pointers which it is. */
hipError_t hipMemcpy(void *to, const void *from, size_t size, int kind) {
    if (kind != 1 && kind != 2) return complain("hipMemcpy of kind %d\n", kind);
    int target = block_of(to), source = block_of(from);
    if (size && ((target < 0 && source < 0) || is_beyond(target, to, size) ||
                 is_beyond(source, from, size)))
        return status(hipErrorInvalidValue);
    return size ? memcpy(to, from, size) : NULL, sticky;
}

hipError_t hipMemGetInfo(size_t *available, size_t *total) {
    if (available) *available = FREE_BYTES;
    if (total) *total = FREE_BYTES;
    return sticky;
}

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
    if (!stream || flags > 1) return status(hipErrorInvalidValue);
    if (flags != 1) return complain("a stream with flags %u\n", flags);
    return *stream = test_stream(), sticky;
}

struct Scale { const float *x; float *out; int64_t count; float a; };

static void scale(const struct Scale *p) {
    for (int64_t i = 0; i < p->count; i++) p->out[i] = p->a * p->x[i] + p->x[i ^ 1];
}

static int misbehave(const struct Scale *p) {
    int number = ++launches;
    if (scripted("abort", number)) {
        fprintf(stderr, "Memory access fault by GPU node-1 (Agent handle: 0x55d0) on address "
                        "0x7f1000. Reason: Page not present or supervisor privilege.\n");
        abort();
    }
    if (scripted("segv", number)) raise(SIGSEGV);
    if (scripted("kill", number)) raise(SIGKILL);
    if (scripted("exit", number)) _exit(7);
    while (scripted("hang", number)) pause();
    if (scripted("fault", number)) sticky = 700;
    if (scripted("refuse", number)) return 701;
    scale(p);
    if (scripted("wrong", number)) p->out[3] += 1;
    if (scripted("nan", number)) memset(&p->out[3], 0xff, sizeof(float));
    if (scripted("beyond", number)) p->out[p->count] = 0;
    return hipSuccess;
}

/* Code objects */

static uint64_t sum_of(const unsigned char *data, size_t size) {
    uint64_t sum = 14695981039346656037ull;
    for (size_t i = 0; i < size; i++) sum = (sum ^ data[i]) * 1099511628211ull;
    return sum;
}

static const unsigned char *at_address(const unsigned char *image, uint64_t address) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Phdr *part = (const void *)(image + head->e_phoff);
    for (int i = 0; i < head->e_phnum; i++)
        if (part[i].p_type == PT_LOAD && address - part[i].p_vaddr < part[i].p_filesz)
            return image + part[i].p_offset + (address - part[i].p_vaddr);
    return NULL;
}

/* The 64-byte descriptor of a kernel: argument bytes at 8. */
static const unsigned char *descriptor(const unsigned char *image, const char *name) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + head->e_shoff);
    char wanted[300];
    snprintf(wanted, sizeof wanted, "%s.kd", name);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) continue;
        const char *strings = (const char *)image + sections[sections[i].sh_link].sh_offset;
        const Elf64_Sym *symbols = (const void *)(image + sections[i].sh_offset);
        for (size_t n = 0; n < sections[i].sh_size / sizeof *symbols; n++)
            if (!strcmp(strings + symbols[n].st_name, wanted))
                return at_address(image, symbols[n].st_value);
    }
    return NULL;
}

/* HIP */

hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
    if (failing("hipModuleLoadData")) return last_error;
    if (!module || !image) return complain("hipModuleLoadData: a null pointer\n");
    const Elf64_Ehdr *head = image;
    if (memcmp(head->e_ident, ELFMAG, 4)) return status(hipErrorInvalidKernelFile);
    if (memcmp(head->e_ident + 4, "\2\1\1", 3) || head->e_machine != MACHINE_AMDGPU ||
        head->e_ident[EI_OSABI] != ABI_HSA)
        return complain("hipModuleLoadData: an ELF file that is no code object\n");
    if (machine && (int)(head->e_flags & 0xff) != machine)
        return status(hipErrorSharedObjectInitFailed);
    hipModule_t loaded = made(MODULE, sizeof *loaded);
    loaded->image = image;
    loaded->size = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    loaded->sum = sum_of(image, loaded->size);
    note("hipModuleLoadData image of %zu bytes for %02x\n", loaded->size, head->e_flags & 0xff);
    *module = loaded;
    return hipSuccess;
}

hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    if (failing("hipModuleGetFunction")) return last_error;
    if (!function || !name || !*name) return complain("hipModuleGetFunction: an empty argument\n");
    if (!module) return status(hipErrorInvalidHandle);
    const unsigned char *described = is(MODULE, module) ? descriptor(module->image, name) : NULL;
    if (!described) return status(hipErrorNotFound);
    hipFunction_t found = made(FUNCTION, sizeof *found);
    found->module = module;
    snprintf(found->name, sizeof found->name, "%s", name);
    memcpy(&found->kernarg, described + 8, 4);
    note("hipModuleGetFunction %s takes %u bytes\n", name, found->kernarg);
    *function = found;
    return hipSuccess;
}

/* One packed buffer for all arguments: five words in `extra`, as the HIP manual orders them. */
static int packed(void **extra, const void **arguments, size_t *bytes) {
    if (extra[0] != HIP_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != HIP_LAUNCH_PARAM_BUFFER_SIZE ||
        extra[4] != HIP_LAUNCH_PARAM_END)
        return complain("extra is %p . %p . %p\n", extra[0], extra[2], extra[4]);
    if (!extra[1] || !extra[3]) return complain("extra has a null pointer\n");
    *arguments = extra[1];
    *bytes = *(const size_t *)extra[3];
    return hipSuccess;
}

hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned gridX, unsigned gridY, unsigned gridZ,
                                 unsigned blockX, unsigned blockY, unsigned blockZ,
                                 unsigned dynamicLds, hipStream_t stream, void **kernelParams,
                                 void **extra) {
    if (failing("hipModuleLaunchKernel")) return last_error;
    if (!is(FUNCTION, f)) return status(hipErrorInvalidHandle);
    if (stream && !is(STREAM, stream)) return status(hipErrorInvalidValue);
    if (gridY != 1 || gridZ != 1 || blockY != 1 || blockZ != 1)
        return complain("grid y z %u %u, block y z %u %u\n", gridY, gridZ, blockY, blockZ);
    if ((uint64_t)gridX * blockX >> 32) return status(hipErrorInvalidConfiguration);
    if (!gridX || !blockX || blockX > MOST_WORK_ITEMS)
        return complain("%u groups of %u work-items\n", gridX, blockX);
    if (dynamicLds) return complain("%u bytes of LDS beyond the kernel's own\n", dynamicLds);
    if (kernelParams || !extra) return complain("kernelParams %p, extra %p\n", (void *)kernelParams,
                                                (void *)extra);
    if (sum_of(f->module->image, f->module->size) != f->module->sum)
        return complain("the image of %s has changed since it was loaded\n", f->name);
    const void *given = NULL;
    size_t bytes = 0;
    if (packed(extra, &given, &bytes)) return last_error;
    if (bytes != f->kernarg)
        return complain("%s takes %u bytes, given %zu\n", f->name, f->kernarg, bytes);
    int number = stream ? stream->number : 0;
    note("hipModuleLaunchKernel %s grid %u block %u stream %d bytes %zu\n", f->name, gridX, blockX,
         number, bytes);
    if (!execute && getenv("ROCM_SD_FAKE_HIP")) return last_error = misbehave(given);
    if (!execute) return hipSuccess;
    void *copy = malloc(bytes);
    memcpy(copy, given, bytes);
    int status = execute(f->module->image, f->module->size, f->name, gridX, blockX, copy, bytes,
                         number);
    free(copy);
    return status ? last_error = status : hipSuccess;
}

hipError_t hipGetLastError(void) {
    int status = last_error;
    last_error = 0;
    return status;
}

const char *hipGetErrorString(hipError_t status) {
    switch (status) {
    case hipSuccess: return "no error";
    case hipErrorInvalidValue: return "invalid argument";
    case hipErrorOutOfMemory: return "out of memory";
    case hipErrorInvalidConfiguration: return "invalid configuration argument";
    case 98: return "invalid device function";
    case 100: return "no ROCm-capable device is detected";
    case hipErrorInvalidDevice: return "invalid device ordinal";
    case 200: return "device kernel image is invalid";
    case 209: return "no kernel image is available for execution on the device";
    case hipErrorInvalidKernelFile: return "invalid kernel file";
    case hipErrorSharedObjectInitFailed: return "shared object initialization failed";
    case hipErrorInvalidHandle: return "invalid resource handle";
    case hipErrorNotFound: return "named symbol not found";
    case 700: return "an illegal memory access was encountered";
    case hipErrorLaunchOutOfResources: return "too many resources requested for launch";
    case 719: return "unspecified launch failure";
    default: return "unknown error";
    }
}
