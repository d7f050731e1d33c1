// NVIDIA's unit, for development: m16n8k16 and m16n8k8 of mma.sync, and ldmatrix. What it offers and how its lanes are laid out:
// common/mma.h, which includes this.
#pragma once

template <typename Rows> struct LanePlace;  // common/tile.h, which a kernel includes

template <typename Half> struct Mma {
    using A = Fragment<4>;
    using B = Fragment<4>;
    using D = Accumulator<8>;
    static constexpr int kColumns = 2, kDistinctLanes = 32;
    static constexpr bool kTransposes = true, kSumsByProduct = true, kSumsEight = true;
    static DEVICE int column(int c) { return lane_id() / 4 + 8 * c; }
    static CONSTEXPR int column_of(int e) { return (e / 2) % 2; }
    static CONSTEXPR int element_step(int c) { return 2 * c; }
    static DEVICE bool first_of_column() { return lane_id() % 4 == 0; }
    static DEVICE bool first_of_row() { return lane_id() < 4; }
    static DEVICE int row(int e) { return lane_row() + row_step(e); }
    static DEVICE int lane_row() { return 2 * (lane_id() % 4); }
    static CONSTEXPR int row_step(int e) { return 8 * (e / 4) + e % 2; }
    template <typename F> static DEVICE float reduce_column(float x, F combine) {
        x = combine(x, lane_xor<1>(x));
        return combine(x, lane_xor<2>(x));
    }
    template <typename F> static DEVICE float reduce_row(float x, F combine) {
        x = combine(x, lane_xor<4>(x));
        x = combine(x, lane_xor<8>(x));
        return combine(x, lane_xor<16>(x));
    }
    static DEVICE A gather_a(const u16* tile, int ld, int last_row) {
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_words<1>(a.w + i, tile + min2(lane_id() / 4 + 8 * (i / 2), last_row) * ld + 2 * (lane_id() % 4) + 8 * (i % 2));
        return a;
    }
    static DEVICE B gather_b(const u16* tile, int ld, int last_column) {
        B b;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_words<1>(b.w + i, tile + min2(lane_id() / 4 + 8 * (i % 2), last_column) * ld + 2 * (lane_id() % 4) + 8 * (i / 2));
        return b;
    }
    static DEVICE A load_a(const u16* tile, int ld, int last_row) { return gather_a(tile, ld, last_row); }
    template <typename Rows> static DEVICE A tile_a(const u16* tile, int row, int column) { return eights<Rows, false>(tile, row, column); }
    template <typename Rows> static DEVICE B tile_b(const u16* tile, int row, int column) { return eights<Rows, true>(tile, row, column); }
    // Sixteen rows from `row` on and columns from `column` on, multiples of sixteen, of a tile at a multiple of 128 bytes: four 8x8
    // matrices, those below each other first if kDown. PTX ISA 9.7.15.5.15, ldmatrix: lane l gives the address of row l % 8 of matrix
    // l / 8 and gets word l % 4 of row l / 4 of each; with .trans halves 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
    template <typename Rows, bool kDown> static DEVICE Fragment<4> eights(const u16* tile, int row, int column) {
#if defined(SIMT_SHIM)
        const int lane = lane_id();
        Fragment<4> f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int down = 8 * (kDown ? i % 2 : i / 2), right = 8 * (kDown ? i / 2 : i % 2);
            load_words<1>(f.w + i, Rows::place(tile, row + lane / 4 + down, column + 2 * (lane % 4) + right));
        }
        return f;
#else
        return matrices(address<Rows>(tile, row_of_eights(kDown), column_of_eights(kDown), row, column));
#endif
    }
    // For multiply_eight: the first eight columns.
    template <typename Rows> static DEVICE A load_a_eight(const u16* tile, int row, int column) {
#if defined(SIMT_SHIM)
        const int lane = lane_id();
        A a = {};
#pragma unroll
        for (int i = 0; i < 4; i += 2) load_words<1>(a.w + i, Rows::place(tile, row + lane / 4 + 4 * i, column + 2 * (lane % 4)));
        return a;
#else
        return eight_columns(address<Rows>(tile, lane_id() % 16, 0, row, column));
#endif
    }
    static DEVICE B load_b(const u16* tile, int ld, int last_column) {
#if defined(SIMT_SHIM)
        return gather_b(tile, ld, last_column);
#else
        return matrices((u32)__cvta_generic_to_shared(tile + min2(lane_id() % 16, last_column) * ld + 8 * (lane_id() / 16)));
#endif
    }
    // tile[k][m]; rows of A from kRows on, 8 or 16, are not read.
    template <int kRows, typename Rows> static DEVICE A load_a_transposed(const u16* tile, int row, int column) {
#if defined(SIMT_SHIM)
        const int lane = lane_id();
        A a;
#pragma unroll
        for (int i = 0; i < kRows / 4; ++i) {
            const int r = row + 2 * (lane % 4) + 8 * (i % 2), c = column + lane / 4 + 8 * (i / 2);
            a.w[i] = *Rows::place(tile, r, c) | (u32)*Rows::place(tile, r + 1, c) << 16;
        }
        return a;
#else
        return transposed<kRows>(address<Rows>(tile, lane_id() % 16, kRows > 8 ? 8 * (lane_id() / 16) : 0, row, column));
#endif
    }
#if !defined(SIMT_SHIM)
    // In LDS, of what a lane reads: its own row and column among sixteen first, so that constants can be added to what all tiles share.
    template <typename Rows> static DEVICE u32 address(const u16* tile, int lane_row, int lane_column, int row, int column) {
        return Rows::across(shared<Rows>(tile, lane_row, lane_column), column) + row * (Rows::kLd * 2);
    }
    template <typename Rows> static DEVICE u32 shared(const u16* tile, int row, int column) {
        return (u32)__cvta_generic_to_shared(Rows::place(tile, row, column));
    }
    static DEVICE int row_of_eights(bool down) { return down ? lane_id() % 16 : lane_id() % 8 + 8 * (lane_id() / 16); }
    static DEVICE int column_of_eights(bool down) { return 8 * (down ? lane_id() / 16 : lane_id() / 8 % 2); }
    static DEVICE Fragment<4> matrices(u32 address) {
        Fragment<4> f;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.w[0]), "=r"(f.w[1]), "=r"(f.w[2]), "=r"(f.w[3])
                     : "r"(address)
                     : "memory");
        return f;
    }
    static DEVICE A eight_columns(u32 address) {
        A a = {};
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(a.w[0]), "=r"(a.w[2]) : "r"(address) : "memory");
        return a;
    }
    template <int kRows> static DEVICE A transposed(u32 address) {
        A a;
        if constexpr (kRows > 8)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a.w[0]), "=r"(a.w[1]), "=r"(a.w[2]), "=r"(a.w[3]) : "r"(address) : "memory");
        else
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a.w[0]), "=r"(a.w[1]) : "r"(address) : "memory");
        return a;
    }
#endif
    // tile_a and load_a_eight, and load_a_transposed, of a tile so many bytes behind the first of its ring. Where that is uniform, and row
    // and column are constants, a load takes no instruction but itself: LDSM adds a lane's register, a uniform one and a constant.
    template <typename Rows> struct KeysInRing {
#if defined(SIMT_SHIM)
        const u16* ring;
        DEVICE void prepare(const u16* first) { ring = first; }
        DEVICE A load(u32 tile_bytes, int row, int column) const { return tile_a<Rows>(ring + tile_bytes / 2, row, column); }
        DEVICE A load_eight(u32 tile_bytes, int row, int column) const { return load_a_eight<Rows>(ring + tile_bytes / 2, row, column); }
#else
        LanePlace<Rows> sixteen, eight;
        DEVICE void prepare(const u16* ring) {
            if constexpr (Rows::kLd % 16 == 8) eight.prepare(shared<Rows>(ring, lane_id() % 16, 0));
            sixteen.prepare(shared<Rows>(ring, row_of_eights(false), column_of_eights(false)));
        }
        DEVICE A load(u32 tile_bytes, int row, int column) const { return matrices(sixteen.at(tile_bytes, row, column)); }
        DEVICE A load_eight(u32 tile_bytes, int row, int column) const { return eight_columns(eight.at(tile_bytes, row, column)); }
#endif
    };
    template <typename Rows> struct ValuesInRing {
#if defined(SIMT_SHIM)
        const u16* ring;
        DEVICE void prepare(const u16* first) { ring = first; }
        template <int kRows> DEVICE A load(u32 tile_bytes, int row, int column) const {
            return load_a_transposed<kRows, Rows>(ring + tile_bytes / 2, row, column);
        }
#else
        LanePlace<Rows> place;  // of lanes 16 to 31 only what sixteen rows need: .x2 ignores their addresses
        DEVICE void prepare(const u16* ring) { place.prepare(shared<Rows>(ring, row_of_eights(true), column_of_eights(true))); }
        template <int kRows> DEVICE A load(u32 tile_bytes, int row, int column) const {
            return transposed<kRows>(place.at(tile_bytes, row, column));
        }
#endif
    };
    static DEVICE void instruction(float* d, const u32* a, const u32* b) {
#if defined(SIMT_SHIM)
        const float c[4] = {d[0], d[1], d[2], d[3]};
        if constexpr (Half::kIsBF16) simt::mma_m16n8k16_bf16(d, a, b, c);
        else simt::mma_m16n8k16_f16(d, a, b, c);
#else
        if constexpr (Half::kIsBF16)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        else
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
    }
    // kRows = 8: only the first eight rows of A and D are wanted, one instruction instead of two.
    template <int kRows> static DEVICE void multiply(const A& a, const B& b, D& d) {
        instruction(d.v, b.w, a.w);
        if constexpr (kRows > 8) instruction(d.v + 4, b.w, a.w + 2);
    }
    // Sums the first eight k only.
    static DEVICE void multiply_eight(const A& a, const B& b, D& d) {
        instruction_8(d.v, b.w, a.w[0]);
        instruction_8(d.v + 4, b.w, a.w[2]);
    }
    static DEVICE void instruction_8(float* d, const u32* a, u32 b) {
#if defined(SIMT_SHIM)
        const u32 low_a[4] = {a[0], a[1], 0, 0}, low_b[2] = {b, 0};
        instruction(d, low_a, low_b);
#else
        if constexpr (Half::kIsBF16)
            asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
        else
            asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
    }
    static DEVICE B pack(const D& d) {
        B b;
#pragma unroll
        for (int i = 0; i < 4; ++i) b.w[i] = pack2<Half>(d.v[2 * i], d.v[2 * i + 1]);
        return b;
    }
    // The tensor cores sum what was rounded, in one instruction instead of eight; and what rounding adds to all goes out of the quotient.
    struct Tally {
        u32 largest = 0;  // two halves from 0 on: they and NaN are ordered as their bits are
        // Not 0 if one is above 2^kMostBits or not a number.
        template <int kMostBits> DEVICE u32 outside() const {
            constexpr u32 kMost = 0x10001u * Half::power_of_2(kMostBits);
            return (largest | (largest + (0x7fff7fffu - kMost))) & 0x80008000u;
        }
        template <int kMostBits> DEVICE bool within() const { return outside<kMostBits>() == 0; }
        DEVICE void join(const Tally& other) { largest = max_halves<Half>(largest, other.largest); }
        DEVICE void add_to(float (&)[kColumns]) const {}
    };
    static DEVICE B weights(const D& d, Tally& tally) {
        const B b = pack(d);
#pragma unroll
        for (int i = 0; i < 4; ++i) tally.largest = max_halves<Half>(tally.largest, b.w[i]);
        return b;
    }
    static DEVICE A ones() {
        constexpr u32 two = 0x10001u * Half::power_of_2(0);
        return A{{two, two, two, two}};
    }
    template <typename F> static DEVICE void pieces(const B& b, F store) {
#pragma unroll
        for (int i = 0; i < 4; ++i) store(column(i % 2), 2 * (lane_id() % 4) + 8 * (i / 2), Words<1>{{b.w[i]}});
    }
};
