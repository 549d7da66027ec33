/* tile_baseline.c - the tile kernel for any CPU: 128-bit vectors (SSE2, NEON). */
#if defined(__aarch64__)
#include <arm_neon.h>
#define DHP_CT_FMA(a, b, c) vfmaq_f32(c, a, b)
#elif defined(__x86_64__)
#include <emmintrin.h>
#define DHP_CT_MAX _mm_max_ps
#define DHP_CT_MIN _mm_min_ps
#endif

#define DHP_CT_LANES 4
#define DHP_SCORE_KEYS 6
#define DHP_SCORE_VECTORS 2
#define DHP_VALUE_ROWS 6
#define DHP_VALUE_VECTORS 2
#define DHP_CPU_KERNEL dhp_cpu_baseline
#define DHP_INSTRUCTIONS "baseline"
#include "tile_impl.h"
