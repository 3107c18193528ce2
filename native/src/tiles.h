// Tiles of AMX units: 32 x 32 products of bf16, and vectors laid out as factors of such products. Callers must check
// that the processor has the units (`bloomery_attention_units`) before they use any of this.
#pragma once

#include "lanes.h"

#if HAS_LANES

#include <string.h>

namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

constexpr int64_t kRows = kLanes;    // rows of a tile; a row is 64 bytes: 32 bf16 or 16 fp32
constexpr int64_t kTile = 16 * 16;   // 32-bit elements of a tile
constexpr int64_t kBlock = 32;       // rows and columns of a block of two by two tiles

// The compiler's own macros do not declare that they access memory.
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_PRODUCT(sum, left, right) \
    asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::: "memory")

struct alignas(64) TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Saves the tile configuration of other code on this thread, and restores it at the end.
struct Units {
    TileShapes before;
    Units() {
        asm volatile("sttilecfg %0" : "=m"(before)::"memory");
        TileShapes ours;
        memset(&ours, 0, sizeof ours);
        ours.palette = 1;
        for (int tile = 0; tile < 8; ++tile) ours.row_bytes[tile] = 64, ours.rows[tile] = 16;
        asm volatile("ldtilecfg %0" ::"m"(ours) : "memory");
    }
    ~Units() { asm volatile("ldtilecfg %0" ::"m"(before) : "memory"); }
    Units(const Units&) = delete;
    Units& operator=(const Units&) = delete;
};

// sums[32 x 32] (+)= left[32 x 32 steps] * right. left: rows of bf16, strides in bytes. right: tiles of pairs; the
// second column of tiles lies right_column bytes further, the next step right_step bytes further.
inline void multiply(float* sums, int64_t sum_stride, bool adds, const Bf16* left, int64_t left_stride,
                     const uint32_t* right, int64_t right_column, int64_t right_step, int64_t steps) {
    char* c = reinterpret_cast<char*>(sums);
    const char* a = reinterpret_cast<const char*>(left);
    const char* b = reinterpret_cast<const char*>(right);
    if (adds) {
        TILE_LOAD(0, c, sum_stride);
        TILE_LOAD(1, c + 64, sum_stride);
        TILE_LOAD(2, c + kRows * sum_stride, sum_stride);
        TILE_LOAD(3, c + kRows * sum_stride + 64, sum_stride);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        TILE_LOAD(4, a, left_stride);
        TILE_LOAD(6, b, 64);
        TILE_PRODUCT(0, 4, 6);
        TILE_LOAD(7, b + right_column, 64);
        TILE_PRODUCT(1, 4, 7);
        TILE_LOAD(5, a + kRows * left_stride, left_stride);
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
        a += 64;
        b += right_step;
    }
    TILE_STORE(0, c, sum_stride);
    TILE_STORE(1, c + 64, sum_stride);
    TILE_STORE(2, c + kRows * sum_stride, sum_stride);
    TILE_STORE(3, c + kRows * sum_stride + 64, sum_stride);
}

inline void store_half(Bf16* to, __m256i values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
}

// Interleaves the elements of two rows, as the right factor of a product requires.
inline __m512i paired(__m256i first, __m256i second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

inline int64_t padded(int64_t count) { return (count + kBlock - 1) / kBlock * kBlock; }

// The vectors of one head: row i is at data + i * stride. What is made from them is padded with zeros to multiples of
// kBlock.
struct Rows {
    Bf16* data;
    int64_t stride, count, width;

    inline __m256i part(int64_t row, int64_t column) const {
        const __mmask16 mask = row < count ? first_lanes(width - column) : 0;
        return _mm256_maskz_loadu_epi16(mask, data + row * stride + column);
    }
    inline void give(int64_t row, int64_t column, __m512 values, int64_t end) const {
        _mm256_mask_storeu_epi16(data + row * stride + column, first_lanes(end - column), rounded(values));
    }
};

// Cosines and sines [positions, width / 2] of the rotary embedding, which rotates the two halves of a vector; or null.
struct Rotary {
    const float *cosines, *sines;

    inline __m512 cosine(int64_t position, int64_t column, int64_t half) const {
        return _mm512_maskz_loadu_ps(first_lanes(half - column), cosines + position * half + column);
    }
    inline __m512 sine(int64_t position, int64_t column, int64_t half) const {
        return _mm512_maskz_loadu_ps(first_lanes(half - column), sines + position * half + column);
    }
    // Rotates both halves of a gradient back: from the gradient of the rotated vector to that of the vector before.
    inline void give_back(const Rows& to, int64_t row, int64_t column, __m512 first, __m512 second) const {
        const int64_t half = to.width / 2;
        const __m512 c = cosine(row, column, half), s = sine(row, column, half);
        to.give(row, column, _mm512_fmadd_ps(first, c, _mm512_mul_ps(second, s)), half);
        to.give(row, column + half, _mm512_fmsub_ps(second, c, _mm512_mul_ps(first, s)), to.width);
    }
};

// Copies rows without gaps, and rotates them if there is a table. The first row is at position `position`.
void copy_rows(const Rows& from, const Rotary& rotary, int64_t position, Bf16* to) {
    if (rotary.cosines != nullptr) {
        const int64_t half = from.width / 2, width = padded(from.width);
        memset(to, 0, static_cast<size_t>(2 * padded(from.count) * width));
        for (int64_t row = 0; row < from.count; ++row, to += width)
            for (int64_t column = 0; column < half; column += kRows) {
                const __m512 c = rotary.cosine(position + row, column, half);
                const __m512 s = rotary.sine(position + row, column, half);
                const __m512 first = widened(from.part(row, column)), second = widened(from.part(row, column + half));
                const Rows turned{to, width, 1, from.width};
                turned.give(0, column, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)), half);
                turned.give(0, column + half, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)), from.width);
            }
        return;
    }
    for (int64_t row = 0; row < padded(from.count); ++row)
        for (int64_t column = 0; column < padded(from.width); column += kRows, to += kRows)
            store_half(to, from.part(row, column));
}

// Lays rows out as columns of a right factor: for each 16 rows and each 32 of the width, a tile of 16 pairs x 16 rows.
void turn_rows(const Rows& from, uint32_t* to) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(2 * from.stride)));
    for (int64_t row = 0; row < padded(from.count); row += kRows) {
        const __mmask16 mask = first_lanes(from.count - row);
        for (int64_t column = 0; column < padded(from.width); column += 2, to += kRows)
            _mm512_storeu_si512(to, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), column < from.width ? mask : 0,
                                                               offsets, from.data + row * from.stride + column, 1));
    }
}

// Lays rows out as rows of a right factor: for each 32 rows and each 16 of the width, a tile of 16 row pairs x 16.
void pair_rows(const Rows& from, uint32_t* to) {
    for (int64_t row = 0; row < padded(from.count); row += kBlock)
        for (int64_t column = 0; column < padded(from.width); column += kRows)
            for (int64_t pair = row; pair < row + kBlock; pair += 2, to += kRows)
                _mm512_storeu_si512(to, paired(from.part(pair, column), from.part(pair + 1, column)));
}

#pragma GCC pop_options

}  // namespace

#endif
