// What the cross-lane and matrix instructions do, for all lanes of a wave at once.
//
// Sources: "RDNA2 Instruction Set Architecture", its descriptions of DPP16, DS_BPERMUTE_B32, DS_PERMUTE_B32, DS_SWIZZLE_B32, V_PERM_B32,
// V_PERMLANE16_B32, V_PERMLANEX16_B32 and V_DOT2_F32_F16; "RDNA3 Instruction Set Architecture" and "RDNA4 Instruction Set
// Architecture", WMMA; "AMD Instinct MI200 Instruction Set Architecture", MFMA; PTX ISA, "Matrix fragments for mma.m16n8k16".
// No document gives the order of a matrix instruction's sum: here it is C first, then k ascending, rounded to float at each step.
#include <math.h>

#include "simt.h"

namespace simt {

// V_EXP_F32: denormals are flushed to zero, arguments and results alike.
float exp2_flushed(float x) {
    constexpr float kSmallestNormal = 0x1p-126f;
    const float y = exp2f(fabsf(x) < kSmallestNormal ? 0.0f : x);
    return y < kSmallestNormal ? 0.0f : y;
}

namespace compute {

static Move& lane_move(void* const* operands, int lane) { return *(Move*)operands[lane]; }

void wave_barrier(void* const*, int) {}

void ds_bpermute(void* const* operands, int wave_size) {
    for (int lane = 0; lane < wave_size; ++lane) {
        Move& move = lane_move(operands, lane);
        move.result = lane_move(operands, (int)(move.control[0] / 4 % wave_size)).value;
    }
}

void ds_permute(void* const* operands, int wave_size) {  // of several lanes that write to one, the highest wins
    for (int lane = 0; lane < wave_size; ++lane) lane_move(operands, lane).result = 0;
    for (int lane = 0; lane < wave_size; ++lane) {
        const Move& move = lane_move(operands, lane);
        lane_move(operands, (int)(move.control[0] / 4 % wave_size)).result = move.value;
    }
}

void ds_swizzle(void* const* operands, int wave_size) {
    for (int lane = 0; lane < wave_size; ++lane) {
        Move& move = lane_move(operands, lane);
        const u32 pattern = move.control[0];
        if (pattern >= 0xc000) fail("ds_swizzle: pattern 0x%x (rotate and FFT modes) is not implemented", pattern);
        int from;
        if (pattern & 0x8000) from = (lane & ~3) | (pattern >> 2 * (lane & 3) & 3);
        else from = (lane & ~31) | (((lane & (pattern & 31)) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31));
        move.result = lane_move(operands, from).value;
    }
}

// The lane that `lane` reads under a DPP control word; -1 when it lies outside of the row of 16.
static int dpp_source(int lane, u32 control, int wave_size) {
    const int row = lane & ~15, i = lane & 15, n = (int)(control & 15);
    if (control <= 0xff) return (lane & ~3) | (control >> 2 * (lane & 3) & 3);  // quad_perm
    if (control > 0x100 && control <= 0x10f) return i + n <= 15 ? row + i + n : -1;  // row_shl
    if (control > 0x110 && control <= 0x11f) return i - n >= 0 ? row + i - n : -1;   // row_shr
    if (control > 0x120 && control <= 0x12f) return row + ((i - n) & 15);            // row_ror
    if (control == 0x140) return row + 15 - i;                                       // row_mirror
    if (control == 0x141) return row + (i ^ 7);                                      // row_half_mirror
    if (control >= 0x150 && control <= 0x15f) return row + n;                        // row_share; row_newbcast on gfx90a
    if (control >= 0x160 && control <= 0x16f && wave_size == 32) return row + (i ^ n);  // row_xmask, gfx10 and later
    fail("DPP control 0x%x is reserved, or not implemented, for waves of %d", control, wave_size);
}

void dpp(void* const* operands, int wave_size) {
    for (int lane = 0; lane < wave_size; ++lane) {
        Move& move = lane_move(operands, lane);
        const u32 row_mask = move.control[1], bank_mask = move.control[2];
        const int from = dpp_source(lane, move.control[0], wave_size);
        const bool enabled = (row_mask >> lane / 16 & 1) && (bank_mask >> lane % 16 / 4 & 1);
        if (!enabled) move.result = move.old;
        else if (from >= 0) move.result = lane_move(operands, from).value;
        else move.result = move.control[3] ? 0 : move.old;
    }
}

static void permute_rows(void* const* operands, int wave_size, int row_flip) {
    if (wave_size != 32) fail("v_permlane16_b32 and v_permlanex16_b32 need waves of 32 (gfx10 and later)");
    for (int lane = 0; lane < wave_size; ++lane) {
        Move& move = lane_move(operands, lane);
        for (int other = 0; other < wave_size; ++other)
            if (lane_move(operands, other).control[0] != move.control[0] || lane_move(operands, other).control[1] != move.control[1])
                fail("permlane: the selects are scalars, lanes %d and %d give different ones", lane, other);
        const u32 select = move.control[lane % 16 / 8] >> 4 * (lane % 8) & 15;
        move.result = lane_move(operands, ((lane & 16) ^ row_flip) + (int)select).value;
    }
}
void permlane16(void* const* operands, int wave_size) { permute_rows(operands, wave_size, 0); }
void permlanex16(void* const* operands, int wave_size) { permute_rows(operands, wave_size, 16); }

void readlane(void* const* operands, int wave_size) {
    const u32 from = lane_move(operands, 0).control[0];
    for (int lane = 0; lane < wave_size; ++lane) {
        if (lane_move(operands, lane).control[0] != from) fail("readlane: the lane number is a scalar, lanes 0 and %d give different ones", lane);
        lane_move(operands, lane).result = lane_move(operands, (int)(from % wave_size)).value;
    }
}

void readfirstlane(void* const* operands, int wave_size) {
    for (int lane = 0; lane < wave_size; ++lane) lane_move(operands, lane).result = lane_move(operands, 0).value;
}

void ballot(void* const* operands, int wave_size) {
    u32 half[2] = {0, 0};
    for (int lane = 0; lane < wave_size; ++lane) half[lane / 32] |= (lane_move(operands, lane).value & 1) << lane % 32;
    for (int lane = 0; lane < wave_size; ++lane) lane_move(operands, lane).result = half[lane_move(operands, lane).control[0] & 1];
}

// Layouts: which element of A (m, k), B (k, n) and D (m, n) a lane's i-th operand is.
struct WmmaGfx11 {
    static constexpr const char* kName = "wmma (gfx11)";
    static constexpr int kWave = 32, kM = 16, kN = 16, kK = 16, kHalvesA = 16, kHalvesB = 16, kResults = 8;
    static int a_m(int lane, int) { return lane % 16; }
    static int a_k(int, int i) { return i; }
    static int b_n(int lane, int) { return lane % 16; }
    static int b_k(int, int i) { return i; }
    static int d_m(int lane, int e) { return 2 * e + lane / 16; }
    static int d_n(int lane, int) { return lane % 16; }
};
template <int kWaveSize, int kHalves> struct SplitK {
    static constexpr int kWave = kWaveSize, kM = 16, kN = 16, kK = 16, kHalvesA = kHalves, kHalvesB = kHalves, kResults = kHalves;
    static int a_m(int lane, int) { return lane % 16; }
    static int a_k(int lane, int i) { return kHalves * (lane / 16) + i; }
    static int b_n(int lane, int) { return lane % 16; }
    static int b_k(int lane, int i) { return kHalves * (lane / 16) + i; }
    static int d_m(int lane, int e) { return kHalves * (lane / 16) + e; }
    static int d_n(int lane, int) { return lane % 16; }
};
struct WmmaGfx12 : SplitK<32, 8> {
    static constexpr const char* kName = "wmma (gfx12)";
};
struct Mfma16x16x16 : SplitK<64, 4> {
    static constexpr const char* kName = "mfma_f32_16x16x16";
};
struct MmaM16N8K16 {
    static constexpr const char* kName = "mma.m16n8k16";
    static constexpr int kWave = 32, kM = 16, kN = 8, kK = 16, kHalvesA = 8, kHalvesB = 4, kResults = 4;
    static int a_m(int lane, int i) { return lane / 4 + (i / 2 % 2 ? 8 : 0); }
    static int a_k(int lane, int i) { return 2 * (lane % 4) + i % 2 + (i >= 4 ? 8 : 0); }
    static int b_n(int lane, int) { return lane / 4; }
    static int b_k(int lane, int i) { return 2 * (lane % 4) + i % 2 + (i >= 2 ? 8 : 0); }
    static int d_m(int lane, int e) { return lane / 4 + (e >= 2 ? 8 : 0); }
    static int d_n(int lane, int e) { return 2 * (lane % 4) + e % 2; }
};

struct Element {
    int lane = -1;
    u16 bits;
};

// Two lanes that hold the same element must agree: gfx11 wants lanes 16..31 to repeat lanes 0..15.
static void deposit(Element& element, int lane, u16 bits, const char* name, const char* matrix, int row, int column) {
    if (element.lane >= 0 && element.bits != bits)
        fail("%s: lanes %d and %d must hold the same %s[%d][%d], they hold 0x%04x and 0x%04x", name, element.lane, lane, matrix, row,
             column, element.bits, bits);
    element.lane = lane, element.bits = bits;
}

template <typename L> static void multiply(void* const* operands, int wave_size) {
    if (wave_size != L::kWave) fail("%s needs waves of %d, not %d", L::kName, L::kWave, wave_size);
    Element a_bits[L::kM][L::kK], b_bits[L::kK][L::kN];
    float a[L::kM][L::kK], b[L::kK][L::kN], d[L::kM][L::kN];
    const int bf16 = ((const Product*)operands[0])->bf16;
    for (int lane = 0; lane < wave_size; ++lane) {
        const Product& in = *(const Product*)operands[lane];
        for (int i = 0; i < L::kHalvesA; ++i) {
            const int m = L::a_m(lane, i), k = L::a_k(lane, i);
            deposit(a_bits[m][k], lane, in.a[i], L::kName, "A", m, k);
            a[m][k] = to_float(in.a[i], bf16);
        }
        for (int i = 0; i < L::kHalvesB; ++i) {
            const int k = L::b_k(lane, i), n = L::b_n(lane, i);
            deposit(b_bits[k][n], lane, in.b[i], L::kName, "B", k, n);
            b[k][n] = to_float(in.b[i], bf16);
        }
        for (int e = 0; e < L::kResults; ++e) d[L::d_m(lane, e)][L::d_n(lane, e)] = in.d[e];
    }
    for (int m = 0; m < L::kM; ++m)
        for (int k = 0; k < L::kK; ++k)
            for (int n = 0; n < L::kN; ++n) d[m][n] += a[m][k] * b[k][n];
    for (int lane = 0; lane < wave_size; ++lane)
        for (int e = 0; e < L::kResults; ++e) ((Product*)operands[lane])->d[e] = d[L::d_m(lane, e)][L::d_n(lane, e)];
}

void wmma_gfx11(void* const* operands, int wave_size) { multiply<WmmaGfx11>(operands, wave_size); }
void wmma_gfx12(void* const* operands, int wave_size) { multiply<WmmaGfx12>(operands, wave_size); }
void mfma_16x16x16(void* const* operands, int wave_size) { multiply<Mfma16x16x16>(operands, wave_size); }
void mma_m16n8k16(void* const* operands, int wave_size) { multiply<MmaM16N8K16>(operands, wave_size); }

}  // namespace compute
}  // namespace simt
