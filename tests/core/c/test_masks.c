/* test_masks.c - csrc/mask.h against its definition, and the CPU kernel under masks that are no prefix of the keys. */
#include <math.h>

#include "check.h"
#include "reference.h"
#include "test_cpu.h"

/* ---- ranges ---------------------------------------------------------------------------------------------------- */

/* The definition, of bounds that were not clamped; differences of lengths do not overflow. */
static int is_in_band(int64_t i, int64_t j, int64_t lowest, int64_t highest) {
  return lowest <= j - i && j - i <= highest;
}

static void check_band(int queries, int keys, int64_t lowest, int64_t highest) {
  const dhp_mask mask = dhp_mask_band(queries, keys, lowest, highest);
  dhp_key_range before = {0, 0};
  int wrong = 0, moved_back = 0, behind = 0;
  for (int64_t i = 0; i < queries; i++) {
    const dhp_key_range row = dhp_mask_row(&mask, i);
    for (int64_t j = -1; j <= keys; j++) {
      const int is_seen = j >= 0 && j < keys && is_in_band(i, j, lowest, highest);
      wrong += is_seen != (row.first <= j && j < row.last);
      behind += is_seen && j >= dhp_mask_keys_seen(&mask);
    }
    moved_back += row.first < before.first || row.last < before.last || row.last < row.first;
    before = row;
  }
  check(wrong == 0 && moved_back == 0 && behind == 0,
        "Sq=%d, Sk=%d, %lld to %lld: %d keys wrong, %d rows move back, %d keys behind the last", queries, keys,
        (long long)lowest, (long long)highest, wrong, moved_back, behind);
  if (queries > 0 && lowest <= highest)
    check(dhp_mask_keys_seen(&mask) == before.last,
          "Sq=%d, Sk=%d, %lld to %lld: %lld keys seen, the last row ends at %lld", queries, keys, (long long)lowest,
          (long long)highest, (long long)dhp_mask_keys_seen(&mask), (long long)before.last);
}

static void test_bands(void) {
  check_group("ranges of masks, against the definition");
  static const int64_t bounds[] = {
      INT64_MIN, INT64_MIN + 1, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, INT64_MAX - 1, INT64_MAX};
  enum { BOUNDS = sizeof bounds / sizeof *bounds };
  for (int queries = 0; queries <= 6; queries++)
    for (int keys = 0; keys <= 7; keys++)
      for (int low = 0; low < BOUNDS; low++)
        for (int high = 0; high < BOUNDS; high++)
          check_band(queries, keys, bounds[low], bounds[high]);
}

__extension__ typedef __int128 wide; /* in which nothing below overflows */

/* As csrc/dhp_fa.h says it. */
static int is_visible_by(const dhp_attention *args, int64_t i, int64_t j) {
  const wide beyond = (wide)j - i - args->causal_offset;
  if (args->is_causal && beyond > 0) return 0;
  if (!args->is_windowed) return 1;
  return (args->window_left == -1 || beyond >= -(wide)args->window_left) &&
         (args->window_right == -1 || beyond <= args->window_right);
}

/* Row i of the longest lengths begins and ends where the definition has it. */
static void check_row_of_call(const dhp_attention *args, int64_t i) {
  const dhp_mask mask = dhp_mask_of(args);
  const dhp_key_range row = dhp_mask_row(&mask, i);
  const int64_t keys = args->k.size[2];
  int right = 1;
  if (row.first == row.last) /* then neither the first nor the last key is seen, nor those where the range stands */
    right = !is_visible_by(args, i, 0) && !is_visible_by(args, i, keys - 1) &&
            (row.first == keys || !is_visible_by(args, i, row.first));
  else
    right = is_visible_by(args, i, row.first) && (row.first == 0 || !is_visible_by(args, i, row.first - 1)) &&
            is_visible_by(args, i, row.last - 1) && (row.last == keys || !is_visible_by(args, i, row.last));
  check(right, "causal %d, offset %lld, window %d (%lld, %lld): row %lld sees [%lld, %lld)", args->is_causal,
        (long long)args->causal_offset, args->is_windowed, (long long)args->window_left, (long long)args->window_right,
        (long long)i, (long long)row.first, (long long)row.last);
}

static void test_calls(void) {
  check_group("masks of calls, against dhp_fa.h");
  const int64_t most = (1 << 30) - 256; /* of a sequence, by csrc/attention.c */
  const int64_t offsets[] = {0,         1,        -1,        most - 2,      most - 1,  most,          most + 1,
                             1 - most,  -most,    -1 - most, INT64_MAX - 1, INT64_MAX, INT64_MIN + 1, INT64_MIN,
                             INT32_MAX, INT32_MIN};
  const int64_t lengths[] = {1, 2, 100, most};
  const int64_t sides[] = {-1, 0, 3, most - 2, INT64_MAX};
  for (int q = 0; q < 4; q++)
    for (int k = 0; k < 4; k++)
      for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++)
        for (int n = 0; n < 2 * 26; n++) {
          const int causal = n % 2, window = n / 2; /* the last: none */
          const dhp_attention args = {.q.size = {1, 1, lengths[q], 8},
                                      .k.size = {1, 1, lengths[k], 8},
                                      .is_causal = causal,
                                      .causal_offset = offsets[o],
                                      .is_windowed = window < 25,
                                      .window_left = window < 25 ? sides[window / 5] : 0,
                                      .window_right = window < 25 ? sides[window % 5] : 0};
          const int64_t rows[] = {0, lengths[q] / 2, lengths[q] - 1};
          for (int i = 0; i < 3; i++)
            check_row_of_call(&args, rows[i]);
        }
}

/* ---- the kernel under a window --------------------------------------------------------------------------------- */

typedef struct window {
  int queries, keys, head_dim, lowest, highest;
} window;

static void check_window(const dhp_cpu_kernel *kernel, problem *p, window w, const char *what, double allowed) {
  problem_poison(p);
  run_kernel(kernel, p);
  const comparison result = compare(p);
  check(result.conditioned <= allowed && result.lse <= 2e-6 && result.mismatches == 0 && problem_gaps_touched(p) == 0,
        "%s, dtype %d, Sq=%d Sk=%d D=%d, %d to %d, %s: error %.2e, lse %.2e, %d mismatches", kernel->instructions,
        (int)p->args.q.dtype, w.queries, w.keys, w.head_dim, w.lowest, w.highest, what, result.conditioned, result.lse,
        result.mismatches);
}

/* Right values; then NaN and infinity in some keys and values: where they are hidden, results stay numbers. */
static void check_windows(window w, dhp_dtype dtype, memory_layout layout) {
  static const double values[] = {NAN, INFINITY, -INFINITY};
  for (int k = 0; k < test_kernel_count; k++) {
    problem p = problem_new((shape){1, 2, 1, w.queries, w.keys, w.head_dim, 0, 0}, dtype, layout);
    p.mask = dhp_mask_band(w.queries, w.keys, w.lowest, w.highest);
    check_window(&test_kernels[k], &p, w, "numbers", tolerance(dtype));
    const dhp_key_range first = dhp_mask_row(&p.mask, 0), last = dhp_mask_row(&p.mask, w.queries - 1);
    const int64_t bad[] = {first.first - 1, first.last, last.first - 1, last.last, random_below(w.keys)};
    for (int i = 0; i < 5; i++)
      if (bad[i] >= 0 && bad[i] < w.keys) set(&p.args.v, 0, 0, bad[i], random_below(w.head_dim), values[i % 3]);
    check_window(&test_kernels[k], &p, w, "bad values", HUGE_VAL);
    for (int i = 0; i < 5; i++)
      if (bad[i] >= 0 && bad[i] < w.keys) set(&p.args.k, 0, 0, bad[i], random_below(w.head_dim), NAN);
    check_window(&test_kernels[k], &p, w, "NaN keys", HUGE_VAL);
    problem_free(&p);
  }
}

static void test_windows(void) {
  check_group("windows, with NaN in what is hidden");
  static const window windows[] = {
      {9, 100, 16, 93, 97},     /* narrower than a block of rows, over the edge of a key tile; late rows see nothing */
      {30, 20, 19, -15, -4},    /* wider than a block of rows; early rows see nothing */
      {150, 333, 33, 100, 140}, /* two tiles of rows; key tiles before the window */
      {3, 300, 8, 200, 230},    /* the window begins in the third key tile */
      {140, 301, 65, -20, 190}, /* three key tiles in a row's range */
      {131, 131, 7, 0, 0},      /* one key each */
      {130, 97, 20, -96, -1},   /* early rows see nothing, late ones all but the first keys */
      {20, 50, 5, 3, 2},        /* no row sees anything */
      {17, 60, 12, 55, 400},    /* the last rows see nothing, and no row lacks the last key */
      {1, 193, 64, 96, 192},    /* decoding, from the beginning of a key tile */
      {5, 200, 90, 191, 260},
  };
  for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_BFLOAT16; dtype++)
      check_windows(windows[i], (dhp_dtype)dtype, (memory_layout)(i % 4));
  for (int i = 0; i < 24; i++) {
    const int lowest = random_below(360) - 180;
    const window w = {1 + random_below(160), 1 + random_below(220), 1 + random_below(70), lowest,
                      lowest + random_below(random_below(2) ? 12 : 250)};
    check_windows(w, (dhp_dtype)(i % 3), (memory_layout)random_below(4));
  }
}

void test_masks(void) {
  test_bands();
  test_calls();
  test_windows();
}
