// What attention.hip is compiled with and called with, and what lies where in LDS.
#pragma once
#include "mma.h"
#include "tile.h"

// BF16_HALVES, HEAD_DIM, MASK_KIND, WAVES_Q, WAVES_D, Q_TILES, BLOCK_K, Q_IN_LDS, CHUNK_D, CHUNK_K, AHEAD, MIN_GROUPS come as definitions
// (lib_rocm_sd/ops/attention/kernel.py), LEAVES_LSE where a backward pass is to follow, and KEY_LENGTHS, without MASK_KIND, where each
// image has its own number of keys.
#if !defined(LEAVES_LSE)
#define LEAVES_LSE 0
#endif
#if !defined(KEY_LENGTHS)
#define KEY_LENGTHS 0
#endif
enum MaskKind { kMaskNone, kMaskBool, kMaskF16, kMaskBF16, kMaskF32 };

struct AttentionParams {  // the same in attention_kernel.py
    const u16* q;
    const u16* k;
    const u16* v;
    u16* out;
    const void* mask;
    i64 q_stride[3], k_stride[3], v_stride[3];  // batch, seq, head; in elements
    i64 mask_stride[4];                         // batch, head, query, key; in elements
    u32 heads, seq_q, seq_k;
    u32 batch_heads;  // batch times heads
    float scale;  // times log2(e); above 0
    u32 flip;     // 0x80008000 where q is to be negated, which makes up for a negative scale
    u32 aligned;  // q, k and v may be read by 16-byte accesses
    u32 head_groups;  // work-groups of each head; if kCopied they may be fewer than tiles of queries
    float* lse;       // LEAVES_LSE only: (B, H, Sq), contiguous
};

#if BF16_HALVES
using Half = BF16;
#else
using Half = F16;
#endif
using Unit = Mma<Half>;
constexpr int kElements = sizeof(typename Unit::D) / sizeof(float);

constexpr int kWaves = WAVES_Q * WAVES_D, kThreads = kWaves * WAVE_SIZE;
constexpr int kBlockQ = WAVES_Q * Q_TILES * 16;
constexpr int kPaddedD = round_up(HEAD_DIM, 16);
constexpr int kTilesD = kPaddedD / 16, kWaveTilesD = (kTilesD + WAVES_D - 1) / WAVES_D;
constexpr int kTilesK = BLOCK_K / 16, kWaveTilesK = kTilesK / WAVES_D;
constexpr bool kParts = CHUNK_D < kPaddedD || CHUNK_K < BLOCK_K;
constexpr bool kPipelined = AHEAD && kCopiesAsync && !kParts, kPartsAhead = AHEAD && kCopiesAsync && kParts;
constexpr bool kCopied = kCopiesAsync && !AHEAD && !kParts;
constexpr int kBuffers = kPipelined ? (Q_IN_LDS ? 4 : 5) : 1, kBuffersPart = kPartsAhead ? 3 : 1;
constexpr int kTileRowsK = kPartsAhead ? kWaveTilesK * 16 : BLOCK_K, kTileColumnsV = kPartsAhead ? kWaveTilesD * 16 : kPaddedD;
constexpr int kChunksD = kPaddedD / CHUNK_D, kChunksK = BLOCK_K / CHUNK_K;
constexpr bool kHalfTile = HEAD_DIM % 16 == 8, kRaggedD = kHalfTile || kTilesD % WAVES_D != 0;

// LDS, in bytes: Q if it stays there, then K and V (one after the other in time if kParts; V transposed unless the unit transposes
// as it reads), in rings of tiles, or if kPartsAhead in a ring of parts for each wave, then P and one float per wave and query.
using RowsQ = LdsRows<kPaddedD, kPartsAhead>;
using RowsK = LdsRows<kCopiesAsync ? min2(CHUNK_D, HEAD_DIM) : CHUNK_D, kCopiesAsync>;
using RowsV = LdsRows<Unit::kTransposes ? min2(kTileColumnsV, HEAD_DIM) : CHUNK_K, kCopiesAsync>;
using RowsP = LdsRows<BLOCK_K, kPartsAhead>;
constexpr int kLdQ = RowsQ::kLd, kLdK = RowsK::kLd, kLdP = RowsP::kLd, kLdV = RowsV::kLd;
constexpr int kBytesQ = kBlockQ * kLdQ * 2, kBytesK = kTileRowsK * kLdK * 2, kBytesV = (Unit::kTransposes ? CHUNK_K : HEAD_DIM) * kLdV * 2;
// How many sixteens of Q's columns a wave holds in registers, from the first on: all, or where Q stays in LDS as many as registers suffice for.
constexpr int kHeldD = !Q_IN_LDS ? kTilesD : kPipelined && HEAD_DIM == 128 && Q_TILES == 2 && MASK_KIND == kMaskNone ? 3 : 0;
constexpr bool kOwnQ = Q_IN_LDS || kPipelined || kCopied, kStagedOut = kCopiesAsync && kOwnQ && WAVES_D == 1;
// Where in its ring of K this lane reads is kept where registers suffice, that of V in every pipeline.
constexpr bool kKeepsKeyPlaces = kPipelined && !Q_IN_LDS;
constexpr int kBytesPart = max2(kBytesK, kBytesV);
constexpr int kOffsetK = kOwnQ ? kBytesQ : 0, kOffsetV = kOffsetK + (kParts ? 0 : kBuffers * kBytesK);
constexpr int kEndKV = kParts ? kOffsetK + (kPartsAhead ? kWaves : 1) * kBuffersPart * kBytesPart : kOffsetV + kBuffers * kBytesV;
constexpr int kOffsetP = kOwnQ ? kEndKV : max2(kEndKV, kBytesQ);
constexpr int kOffsetStats = kOffsetP + (WAVES_D > 1 ? kBlockQ * kLdP * 2 : 0);
constexpr int kLdsBytes = kOffsetStats + (WAVES_D > 1 ? WAVES_D * kBlockQ * 4 : 0);

static_assert(HEAD_DIM % 8 == 0 && BLOCK_K % (16 * WAVES_D) == 0 && kPaddedD % CHUNK_D == 0 && BLOCK_K % CHUNK_K == 0, "tiles must divide");
static_assert(CHUNK_D == kPaddedD || kPaddedD == HEAD_DIM, "padded columns only in an only chunk");
static_assert(WAVES_D > 1 || CHUNK_K == BLOCK_K, "P in registers is not indexed by a chunk");
static_assert(!kPipelined || WAVES_D == 1, "the pipeline is for waves on their own");
static_assert(!kPipelined || kBytesK == kBytesV, "one offset serves both rings");
static_assert(CHUNK_D % 16 == 0 && CHUNK_K % 16 == 0, "a chunk is whole 16-wide tiles");
static_assert(kLdsBytes <= LDS_BYTES, "the tiles do not fit the LDS of this GPU");
static_assert(!kCopiesAsync || (kOffsetK | kOffsetV | kOffsetP | kBytesK | kBytesV | kBytesPart) % 128 == 0, "LdsRows counts on that");
EXPORT_LDS_BYTES(kLdsBytes)
