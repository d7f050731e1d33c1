// GroupNorm of small images, and SiLU after it, in one launch: a work-group holds all pixels of some groups in registers.
//
//   out[n,p,c] = f(x[n,p,c] scale[n,c] + shift[n,c]),  scale = gamma[c] / sqrt(variance[n,g] + eps),  shift = beta[c] - mean[n,g] scale[n,c]
//
//   x, out       (N, pixels, C)  fp16 or bf16, contiguous, aligned to 16 bytes where VECTOR is 8
//   norm         (N, C, 2)       float32: scale, shift
//   gamma, beta  (C)             fp16, bf16 or float32, or none
//   added        (N, C)          float32, or none: what x lacks in each pixel, as a convolution's bias and a time embedding. The norm is that
//                                of x + added, of which only means and shifts know: shift = beta[c] + (added[n,c] - mean[n,g]) scale[n,c]
//
// out or norm may be null: only the other one is wanted. norm has no added.
//
// Numerics. Those of group_norm_silu.hip: no square of a sum is ever subtracted from a sum of squares. A work-item makes mean and sum of
// squared differences of each of its channels from batches of four pixels; all of a group are merged by the formula of Chan, Golub and
// LeVeque (1979), by a wave or several. All orders are fixed: the same input gives the same bits.
//
// Tiling. A work-group makes a run of channels of one image: whole groups that begin and end at multiples of VECTOR channels, with 64
// bytes of a pixel or more, where the image has as many. It is a grid of rows by `width` columns, VECTOR channels each. A work-item
// holds the HELD pixels row, row + rows, ... of its column: memory is read once, all of it asked for before the first value is needed.
// What work-items found passes through LDS, channel by channel. An image has few work-groups, eight with 320 channels: what is won is
// the other launches, so only what fits registers is made so.
#include "common/group_norm.h"

// BF16_HALVES, VECTOR, SILU, HELD, THREADS come as definitions (lib_rocm_sd/ops/group_norm/whole.py).
struct GroupNormWholeParams {  // the same in lib_rocm_sd/ops/group_norm/whole.py
    const u16* x;
    u16* out;
    float* norm;
    const void* gamma;
    const void* beta;
    const float* added;
    u32 channels, pixels, group_channels;
    u32 run, width, blocks;  // channels of a work-group; columns of it; work-groups of an image
    u32 gamma_kind, beta_kind;
    u32 added_stride;  // from one image's to the next's
    float eps;
};

using Values = Vector<VECTOR>;

constexpr int kWaves = THREADS / WAVE_SIZE;
constexpr int kBatch = 4;
constexpr int kMostGroups = 32;  // of a work-group
static_assert(HELD % kBatch == 0, "pixels are taken in batches");
constexpr int kMomentsBytes = THREADS * VECTOR * 8, kLdsBytes = kMomentsBytes + max2(kWaves, kMostGroups) * 16;
static_assert(kLdsBytes <= LDS_BYTES, "the moments do not fit the LDS of this GPU");
EXPORT_LDS_BYTES(kLdsBytes)

// Where a work-item is: HELD pixels of VECTOR channels, row, row + rows, ... The other way round, pixels of each row.
struct Place {
    u32 image, first, channels;  // of the work-group: its image, its first channel, how many it has
    u32 row, rows, channel;      // channel: the work-item's first one, counted from the work-group's
    u32 whole, rest;             // all rows have `whole` pixels, those before `rest` one more
    int valid;                   // pixels of this work-item
    i64 origin;                  // of the work-group's first channel in pixel 0, in elements
    u32 offset;                  // of the work-item's first one behind it, in bytes
    DEVICE explicit Place(const GroupNormWholeParams& p) {
        const u32 thread = thread_id();
        image = block_id() / p.blocks, first = block_id() % p.blocks * p.run, channels = min2(p.run, p.channels - first);
        row = thread / p.width, rows = THREADS / p.width, channel = thread % p.width * VECTOR;
        whole = p.pixels / rows, rest = p.pixels % rows;
        const bool active = row < rows && channel < channels;
        valid = active ? (int)pixels_of(row) : 0;
        origin = (i64)image * p.pixels * p.channels + first, offset = (channel < channels ? channel : 0) * 2;
    }
    DEVICE u32 pixels_of(u32 row) const { return whole + (row < rest ? 1 : 0); }
    // Bytes from the origin to the i-th pixel; to the image's last one where there is none. Of no image that is held 2^32.
    DEVICE u32 at(const GroupNormWholeParams& p, int i) const {
        return offset + min2(row + (u32)i * rows, p.pixels - 1) * p.channels * 2;
    }
};

// Mean, and sum of squared differences from it, of what a work-item holds of a channel; later scale and shift of a channel.
DEVICE Words<2> pair_of(float a, float b) { return {{float_bits(a), float_bits(b)}}; }

// What is added to the work-group's channels.
DEVICE const float* added_to(const GroupNormWholeParams& p, const Place& place) {
    return p.added + (i64)place.image * p.added_stride + place.first;
}

// Of what a work-item holds: whole batches, then what is left.
DEVICE Moments<VECTOR> moments_of(const Place& place, const Values (&values)[HELD]) {
    Moments<VECTOR> moments;
    Values rest[kBatch];
    const int left = place.valid % kBatch;
#pragma unroll
    for (int first = 0; first < HELD; first += kBatch) {
        if (place.valid >= first + kBatch)
            moments.template add<kBatch, true>([&](int k, int i) { return values[first + i].at(k); }, kBatch);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first == 0 || first == place.valid - left) rest[i] = values[first + i];
    }
    if (left) moments.template add<kBatch, false>([&](int k, int i) { return rest[i].at(k); }, left);
    return moments;
}

DEVICE void write_moments(const GroupNormWholeParams& p, const Place& place, const Moments<VECTOR>& moments, Words<2>* pairs) {
    if (place.valid == 0) return;
    Words<2>* to = pairs + place.row * p.width * VECTOR + place.channel;
    float added[VECTOR] = {};
    if (p.added)
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) added[k] = added_to(p, place)[place.channel + k];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) to[k] = pair_of(moments.mean[k] + added[k], moments.m2[k]);
}

template <int kMask> DEVICE void meet(Moments<1>& mine) {
    Moments<1> other[1];
    other[0].mean[0] = lane_xor<kMask>(mine.mean[0]), other[0].m2[0] = lane_xor<kMask>(mine.m2[0]);
    other[0].count = lane_xor<kMask>(mine.count);
    mine.merge(other);
}

// The moments of a group, or of its part `part` of `parts`; every lane of a wave comes here, and the first one gets them.
DEVICE Moments<1> merge_group(const GroupNormWholeParams& p, const Place& place, const Words<2>* pairs, u32 group, u32 part, u32 parts) {
    const u32 step = parts * WAVE_SIZE, step_rows = step / p.group_channels, step_channels = step % p.group_channels;
    const u32 rows = place.whole ? place.rows : place.rest, entries = rows * p.group_channels;
    const u32 mine = part * WAVE_SIZE + thread_id() % WAVE_SIZE;
    u32 row = mine / p.group_channels, channel = mine % p.group_channels;
    Moments<1> moments;
    for (u32 begun = part * WAVE_SIZE; begun < entries; begun += kBatch * step) {
        Moments<1> batch[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const bool exists = row < rows;
            const Words<2> pair = pairs[(exists ? row : 0) * p.width * VECTOR + group * p.group_channels + channel];
            if (exists) {
                batch[i].mean[0] = bits_float(pair.word[0]), batch[i].m2[0] = bits_float(pair.word[1]);
                batch[i].count = (float)place.pixels_of(row);
            }
            row += step_rows, channel += step_channels;
            if (channel >= p.group_channels) channel -= p.group_channels, ++row;
        }
        moments.merge(batch);
    }
    meet<1>(moments), meet<2>(moments), meet<4>(moments), meet<8>(moments), meet<16>(moments);
    if constexpr (WAVE_SIZE == 64) meet<32>(moments);
    return moments;
}

// A group is merged by 2^so many waves.
DEVICE u32 part_bits_of(u32 groups) {
    u32 bits = 0;
#pragma unroll
    for (int waves = 2; waves <= kWaves; waves *= 2) bits += groups * waves <= kWaves ? 1 : 0;
    return bits;
}

// Scale and shift of the work-group's channels, in `pairs` and in norm; every work-item comes here.
DEVICE void make_norm(const GroupNormWholeParams& p, const Place& place, Words<2>* pairs, Words<4>* parts_found) {
    const u32 groups = place.channels / p.group_channels, part_bits = part_bits_of(groups), parts = 1u << part_bits;
    const u32 wave = wave_uniform(thread_id() / WAVE_SIZE), part = wave & (parts - 1);
    for (u32 group = wave >> part_bits; group < groups; group += kWaves >> part_bits) {
        const Moments<1> found = merge_group(p, place, pairs, group, part, parts);
        if (thread_id() % WAVE_SIZE == 0)
            parts_found[group * parts + part] = Words<4>{{float_bits(found.mean[0]), float_bits(found.m2[0]), float_bits(found.count), 0}};
    }
    barrier();
    for (u32 channel = thread_id(); channel < place.channels; channel += THREADS) {
        const Words<4>* from = parts_found + channel / p.group_channels * parts;
        Moments<1> moments;
        for (u32 part = 0; part < parts; ++part) {
            Moments<1> other[1];
            const Words<4> found = from[part];
            other[0].mean[0] = bits_float(found.word[0]), other[0].m2[0] = bits_float(found.word[1]), other[0].count = bits_float(found.word[2]);
            moments.merge(other);
        }
        const u32 here = place.first + channel;
        const float share = reciprocal_sqrt(moments.m2[0] / moments.count + p.eps);
        const float scale = share * affine(p.gamma, p.gamma_kind, here, 1.0f);
        const float centre = moments.mean[0] - (p.added ? added_to(p, place)[channel] : 0.0f);
        const Words<2> made = pair_of(scale, fma_f32(-centre, scale, affine(p.beta, p.beta_kind, here, 0.0f)));
        pairs[channel] = made;
        if (p.norm) ((Words<2>*)p.norm)[(i64)place.image * p.channels + here] = made;
    }
    barrier();
}

// LLVM moves nothing across it: all that is read is asked for before anything waits for a part of it.
DEVICE void all_begun() {
#if !defined(SIMT_SHIM) && !defined(__CUDACC__)
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

KERNEL(THREADS) group_norm_whole(GroupNormWholeParams p) {
    LDS(memory, kLdsBytes);
    Place place(p);
    Words<2>* pairs = (Words<2>*)memory;
    Values values[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        values[i] = Values::template load<true>((const u16*)((const unsigned char*)(p.x + place.origin) + place.at(p, i)));
    all_begun();
    write_moments(p, place, moments_of(place, values), pairs);
    barrier();
    make_norm(p, place, pairs, (Words<4>*)(memory + kMomentsBytes));
    if (!p.out || place.valid == 0) return;
    place.row = kept_here(place.row);  // else addresses would be kept in registers from the reads on
    float scale[VECTOR], shift[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
        const Words<2> pair = pairs[place.channel + k];
        scale[k] = bits_float(pair.word[0]), shift[k] = bits_float(pair.word[1]);
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (i < place.valid)
            Values::template store<true>((u16*)((unsigned char*)(p.out + place.origin) + place.at(p, i)),
                                             [&](int k) { return normed<SILU>(values[i].at(k), scale[k], shift[k]); });
}
