/* tile_avx2.c - the tile kernel for AVX2 and FMA: 16 registers of 8 floats, blocks of 6 x 2. */
#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define DHP_CT_LANES 8
#define DHP_CT_FMA _mm256_fmadd_ps
#define DHP_CT_MAX _mm256_max_ps
#define DHP_CT_MIN _mm256_min_ps
#define DHP_WIDEN_U16(halves) _mm256_cvtepu16_epi32((__m128i)(halves))
#define DHP_SCORE_KEYS 6
#define DHP_SCORE_VECTORS 2
#define DHP_VALUE_ROWS 6
#define DHP_VALUE_VECTORS 2
#define DHP_CPU_KERNEL dhp_cpu_avx2
#define DHP_INSTRUCTIONS "avx2"
#include "tile_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
