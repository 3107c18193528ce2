// Sixteen fp32 lanes: what the kernels for AVX-512 share. HAS_LANES: whether this compiler can generate them.
#pragma once

#include "bloomery.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define HAS_LANES 1
#else
#define HAS_LANES 0
#endif

#if HAS_LANES

// GCC 12 warns of its own intrinsics, which use undefined registers on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

// Every processor loads this library. So code that needs these instructions is marked with a target attribute, and is
// called only where the processor has them. Marked code must not use templates of the standard library: the linker
// shares their instances, and other code would then call instances with these instructions.

namespace {

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

typedef uint16_t Bf16;

constexpr int64_t kLanes = 16;
constexpr float kLog2E = 1.44269504088896341f;

inline __mmask16 first_lanes(int64_t count) {
    return count >= kLanes ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// 2^x with a relative error of 2e-7; 0 if x is far below 0. The polynomial is that of Cephes' exp2f.
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

inline __m512 widened(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m256i rounded(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }


#pragma GCC pop_options

}  // namespace

#endif
