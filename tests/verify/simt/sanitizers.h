// The sanitizers' view of fibers: each switch of stacks is announced. SIMT_ASAN or SIMT_TSAN says which one is linked; the shim
// itself is never instrumented, only the kernel is.
#pragma once
#include <stddef.h>

#if defined(SIMT_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** old_bottom, size_t* old_size);
extern "C" const char* __asan_default_options() { return "detect_stack_use_after_return=0:detect_leaks=0"; }
#endif
#if defined(SIMT_TSAN)
extern "C" void* __tsan_get_current_fiber();
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void* fiber);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:report_signal_unsafe=0"; }
#endif

namespace simt {

#if defined(SIMT_TSAN)
constexpr bool kRaceDetector = true;
constexpr unsigned kSwitchIsNoSync = 1;
inline void acquire(void* address) { __tsan_acquire(address); }
inline void release(void* address) { __tsan_release(address); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void* create_thread() { return __tsan_create_fiber(0); }
inline void destroy_thread(void* thread) { __tsan_destroy_fiber(thread); }
inline void switch_thread(void* thread) { __tsan_switch_to_fiber(thread, kSwitchIsNoSync); }
#else
constexpr bool kRaceDetector = false;
inline void acquire(void*) {}
inline void release(void*) {}
inline void* this_thread() { return nullptr; }
inline void* create_thread() { return nullptr; }
inline void destroy_thread(void*) {}
inline void switch_thread(void*) {}
#endif

// What the address sanitizer keeps per stack.
struct Shadow {
    void* fake_stack;
    const void* bottom;
    size_t bytes;

    // Before a switch from this stack to `to`; `last`: it will never be switched to again.
    void leave([[maybe_unused]] Shadow& to, [[maybe_unused]] bool last) {
#if defined(SIMT_ASAN)
        __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, to.bottom, to.bytes);
#endif
    }
    // After a switch to this stack from `from`, whose bounds are learnt if it is the program's own.
    void enter([[maybe_unused]] Shadow& from) {
#if defined(SIMT_ASAN)
        const void* old_bottom;
        size_t old_bytes;
        __sanitizer_finish_switch_fiber(fake_stack, &old_bottom, &old_bytes);
        if (!from.bottom) from.bottom = old_bottom, from.bytes = old_bytes;
#endif
    }
};

}  // namespace simt
