/* tile_avx512.c - the tile kernel for AVX-512: 32 registers of 16 floats, blocks of 6 x 4. */
#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define DHP_CT_LANES 16
#define DHP_CT_FMA _mm512_fmadd_ps
#define DHP_CT_MAX _mm512_max_ps
#define DHP_CT_MIN _mm512_min_ps
#define DHP_WIDEN_U16(halves) _mm512_cvtepu16_epi32((__m256i)(halves))
#define DHP_SCORE_KEYS 6
#define DHP_SCORE_VECTORS 4
#define DHP_VALUE_ROWS 4
#define DHP_VALUE_VECTORS 4
#define DHP_CPU_KERNEL dhp_cpu_avx512
#define DHP_INSTRUCTIONS "avx512"
#include "tile_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
