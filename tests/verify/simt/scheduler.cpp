// Work-items as fibers. Work-groups run one after the other, in random order. Within a group one wave at a time runs, its lanes
// in random order, each to its next rendezvous; then another wave, or the same, depending on the seed: with odd seeds a wave runs as
// far as it can, to a barrier or its end, before the next one starts, which drives waves as far apart as a missing barrier lets
// them; with even seeds any wave may go on at any rendezvous.
//
// To the race detector a wave is a thread. Waves are ordered by barriers only, and work-groups not at all. Two waves that touch the same LDS or global memory between two barriers, one of them writing, are
// reported. Lanes of one wave that hand something to each other without a rendezvous give wrong results instead, as their order
// is random; that they store the same word to one place, which hardware allows, does not count.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"
#include "sanitizers.h"

// Saves the callee-saved registers on the current stack, and the stack pointer through the first argument; goes on where the stack
// of the second argument was left. A new stack is prepared so that this returns into simt_lane_main.
#if defined(__x86_64__)
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, . - simt_switch
)");
constexpr int kSavedWords = 8, kReturnWord = 6;  // six registers, the return address, one word that keeps calls aligned
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size simt_switch, . - simt_switch
)");
constexpr int kSavedWords = 20, kReturnWord = 11;
#else
#error "the fibers' context switch is written for x86-64 and aarch64"
#endif

namespace simt {

typedef unsigned long long u64;

enum class State { kReady, kWaveOp, kBarrier, kReturned };

// Where a lane waits. Compiled without an optimizer, a kernel has frame pointers, all its barriers are called within barrier(), and all its
// exchanges of a float within one of a word: then two callers count as well.
struct CallSite {
    const void* at[3];
    bool operator==(const CallSite& other) const { return at[0] == other.at[0] && at[1] == other.at[1] && at[2] == other.at[2]; }
};
#if defined(SIMT_FRAMES)
#define SIMT_CALL_SITE {{__builtin_return_address(0), __builtin_return_address(1), __builtin_return_address(2)}}
#else
#define SIMT_CALL_SITE {{__builtin_return_address(0), nullptr, nullptr}}
#endif

struct Lane {
    u32 id;
    State state;
    void* stack_pointer;
    char* stack;
    const char* waits_at;
    CallSite call_site;
    bool vote;  // at a barrier; then whether one lane of the group voted so
    WaveCompute compute;
    void* operands;
    Shadow shadow;
};

constexpr u32 kMaxLanes = 1024;
constexpr size_t kPage = 4096, kStackBytes = 1 << 20;

static Lane lanes[kMaxLanes];
static Lane* current;
static Lane** queue;
static void* scheduler_stack_pointer;
static Shadow scheduler_shadow;
static Job job;
static u32 running_group;
static unsigned char* group_lds;
static unsigned group_lds_bytes;
static void* wave_threads[kMaxLanes];
static void* scheduler_thread;
static u64* barrier_tokens;  // two per group: waves leave their times at one and take all others' from the other, in turns
static u64 end_token;
static u64 random_state;

static u32 random_word() {  // xorshift64*
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return (u32)(random_state * 2685821657736338717ull >> 32);
}
static u32 random_below(u32 limit) { return random_word() % limit; }

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "simt: work-group %u", running_group);
    if (current) fprintf(stderr, ", work-item %u", current->id);
    fprintf(stderr, ": ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    fflush(stderr);
    _exit(3);
}

IgnoreRaces::IgnoreRaces() {
#if defined(SIMT_TSAN)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
}
IgnoreRaces::~IgnoreRaces() {
#if defined(SIMT_TSAN)
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

u32 item_id() { return current->id; }
u32 group_id() { return running_group; }

// The current lane waits: on to the next one in the queue, the last one to the scheduler.
static void yield() {
    Lane& lane = *current;
    Lane* next = current = *++queue;
    lane.shadow.leave(next ? next->shadow : scheduler_shadow, lane.state == State::kReturned);
    simt_switch(&lane.stack_pointer, next ? next->stack_pointer : scheduler_stack_pointer);
    lane.shadow.enter(scheduler_shadow);
}

// Runs lanes, each until it waits; a null ends the list.
static void resume(Lane** list) {
    queue = list, current = *list;
    scheduler_shadow.leave(current->shadow, false);
    simt_switch(&scheduler_stack_pointer, current->stack_pointer);
    scheduler_shadow.enter(scheduler_shadow);
}

void wave_op(const char* name, WaveCompute compute, void* operands) {
    Lane& lane = *current;
    lane.state = State::kWaveOp, lane.waits_at = name, lane.compute = compute, lane.operands = operands;
    lane.call_site = SIMT_CALL_SITE;
    yield();
}

bool group_barrier(bool vote) {
    Lane& lane = *current;
    lane.state = State::kBarrier, lane.waits_at = "barrier", lane.vote = vote;
    lane.call_site = SIMT_CALL_SITE;
    yield();
    return lane.vote;
}

unsigned char* lds(unsigned bytes) {
    if (!group_lds) {
        const IgnoreRaces ignore;
        if (kRaceDetector) {  // fresh pages, so that the last group's accesses are forgotten
            group_lds = (unsigned char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        } else if (posix_memalign((void**)&group_lds, 128, bytes)) {
            fail("no memory for %u bytes of LDS", bytes);
        }
        memset(group_lds, 0xff, bytes);
        group_lds_bytes = bytes;
    }
    if (bytes != group_lds_bytes) fail("asks for %u bytes of LDS, another work-item of its group for %u", bytes, group_lds_bytes);
    return group_lds;
}

static void free_lds() {
    if (group_lds && kRaceDetector) munmap(group_lds, group_lds_bytes);
    else free(group_lds);
    group_lds = nullptr;
}

static void prepare(Lane& lane, u32 id) {
    if (!lane.stack) {
        void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stack of a work-item");
        mprotect(memory, kPage, PROT_NONE);
        lane.stack = (char*)memory;
    }
    void** words = (void**)(lane.stack + kStackBytes) - kSavedWords;
    memset(words, 0, kSavedWords * sizeof(void*));
    words[kReturnWord] = (void*)simt_lane_main;
    lane.id = id, lane.state = State::kReady, lane.stack_pointer = words;
    lane.shadow = {nullptr, lane.stack + kPage, kStackBytes - kPage};
}

static void forget_stack(Lane& lane) {  // the next group's accesses to it are another thread's
    if (kRaceDetector) munmap(lane.stack, kStackBytes), lane.stack = nullptr;
}

static bool meets(const Lane& a, const Lane& b) {
    return a.state == b.state && (a.state == State::kReturned || a.call_site == b.call_site) &&
           (a.state != State::kWaveOp || a.compute == b.compute);
}

static long distance(const void* code) { return code ? (long)((const char*)code - (const char*)simt_call_kernel) : 0; }

// "lanes 0-15 wait at barrier, lanes 16-31 have returned" for the lanes from `first` on.
[[noreturn]] static void report_divergence(u32 first, u32 count, const char* unit) {
    char text[2048];
    int length = snprintf(text, sizeof text, "divergence: ");
    for (u32 begin = first, end; begin < first + count && length < 1800; begin = end) {
        for (end = begin + 1; end < first + count && meets(lanes[begin], lanes[end]);) ++end;
        length += snprintf(text + length, sizeof text - length, "%swork-items %u-%u ", begin == first ? "" : ", ", begin, end - 1);
        if (lanes[begin].state == State::kReturned) length += snprintf(text + length, sizeof text - length, "have returned");
        else
            length += snprintf(text + length, sizeof text - length, "wait at %s (call site %+ld, %+ld, %+ld)", lanes[begin].waits_at,
                               distance(lanes[begin].call_site.at[0]), distance(lanes[begin].call_site.at[1]),
                               distance(lanes[begin].call_site.at[2]));
    }
    fail("%s (all of a %s must meet at the same one)", text, unit);
}

// Runs the lanes of a wave to their next rendezvous; computes it if it is the wave's own. False when the wave can go no further alone.
static bool step_wave(u32 wave) {
    const u32 size = simt_wave_size, first = wave * size;
    const u32 random = random_word(), start = random >> 16, stride = random | 1;
    static Lane* order[kMaxWave + 1];
    order[size] = nullptr;
    for (u32 i = 0; i < size; ++i) order[i] = &lanes[first + (start + i * stride) % size];
    resume(order);
    for (u32 i = 1; i < size; ++i)
        if (!meets(lanes[first], lanes[first + i])) report_divergence(first, size, "wave");
    if (lanes[first].state != State::kWaveOp) return false;
    void* operands[kMaxWave];
    for (u32 i = 0; i < size; ++i) operands[i] = lanes[first + i].operands, lanes[first + i].state = State::kReady;
    const IgnoreRaces ignore;
    lanes[first].compute(operands, (int)size);
    return true;
}

// One interval between barriers, for all waves. False when the group has ended.
static bool run_to_barrier(bool far_apart, u64* from_barrier, u64* to_barrier) {
    u32 runnable[kMaxLanes], count = 0;
    for (u32 wave = 0; wave < job.group_size / simt_wave_size; ++wave) runnable[count++] = wave;
    while (count) {
        const u32 pick = random_below(count);
        bool more = true;
        switch_thread(wave_threads[runnable[pick]]);
        acquire(from_barrier);
        do more = step_wave(runnable[pick]);
        while (more && (far_apart || random_below(4)));
        if (!more) release(to_barrier), release(&end_token);
        switch_thread(scheduler_thread);
        if (!more) runnable[pick] = runnable[--count];
    }
    for (u32 i = 1; i < job.group_size; ++i)
        if (!meets(lanes[0], lanes[i])) report_divergence(0, job.group_size, "work-group");
    if (lanes[0].state == State::kReturned) return false;
    bool any = false;
    for (u32 i = 0; i < job.group_size; ++i) any = any || lanes[i].vote;
    for (u32 i = 0; i < job.group_size; ++i) lanes[i].state = State::kReady, lanes[i].vote = any;
    return true;
}

static void run_group(u32 group) {
    running_group = group;
    const u32 waves = job.group_size / simt_wave_size;
    for (u32 id = 0; id < job.group_size; ++id) prepare(lanes[id], id);
    for (u32 wave = 0; wave < waves; ++wave) wave_threads[wave] = create_thread();
    u64 *from = barrier_tokens + 2 * group, *to = from + 1;
    while (run_to_barrier(job.seed % 2 == 1, from, to)) {
        u64* last = from;
        from = to, to = last;
    }
    for (u32 wave = 0; wave < waves; ++wave) destroy_thread(wave_threads[wave]);
    for (u32 id = 0; id < job.group_size; ++id) forget_stack(lanes[id]);
    free_lds();
}

void run_job(const Job& the_job) {
    job = the_job;
    scheduler_thread = this_thread();
    barrier_tokens = (u64*)malloc(2 * sizeof(u64) * job.groups);
    random_state = job.seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
    for (int i = 0; i < 8; ++i) random_below(2);
    if (simt_wave_size > kMaxWave || job.group_size > kMaxLanes || job.group_size % simt_wave_size || !job.group_size)
        fail("a work-group of %u is not whole waves of %u, or too large", job.group_size, simt_wave_size);
    u32* order = (u32*)malloc(sizeof(u32) * job.groups);
    for (u32 i = 0; i < job.groups; ++i) {
        const u32 j = random_below(i + 1);
        order[i] = order[j], order[j] = i;
    }
    for (u32 i = 0; i < job.groups; ++i) run_group(order[i]);
    acquire(&end_token);
    free(order);
}

}  // namespace simt

extern "C" void simt_lane_main() {
    using namespace simt;
    current->shadow.enter(scheduler_shadow);
    simt_call_kernel(job.params);
    current->state = State::kReturned;
    yield();
    abort();
}
