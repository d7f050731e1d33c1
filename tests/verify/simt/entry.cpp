// Compiled once per kernel and set of definitions: SIMT_SOURCE is the kernel's file, SIMT_ENTRY its entry.
#include SIMT_SOURCE

namespace {
template <typename Params> constexpr unsigned bytes_of(void (*)(Params)) { return sizeof(Params); }
template <typename Params> void call(void (*kernel)(Params), const void* params) { kernel(*(const Params*)params); }
}  // namespace

extern "C" {
extern const unsigned simt_wave_size = WAVE_SIZE;
extern const unsigned simt_params_bytes = bytes_of(SIMT_ENTRY);
void simt_call_kernel(const void* params) { call(SIMT_ENTRY, params); }
}
