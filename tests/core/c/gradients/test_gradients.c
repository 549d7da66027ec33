/* test_gradients.c - the values of dq, dk and dv, against the float64 definition. */
#include <math.h>
#include <string.h>

#include "../check.h"
#include "../test_cpu.h"
#include "gradients.h"

/* Of the sums of magnitudes. Rounding of out in 16 bits enters delta; an error of a score is one of p, so that more is
 * allowed for scores larger than usual. */
static double allowed(const dhp_attention *args) {
  const double unusual = (double)args->scale * sqrt((double)args->q.size[3]);
  return (args->q.dtype == DHP_FLOAT64 ? 1e-14 : tolerance(args->q.dtype)) * fmax(1.0, unusual);
}

static void check_results(gradient_problem *p, const char *kernel, const char *what) {
  gradient_comparison results[3];
  gradients_compare(p, results);
  const dhp_tensor *const q = &p->args.forward.q, *const k = &p->args.forward.k;
  for (int i = 0; i < 3; i++)
    check(results[i].conditioned <= allowed(&p->args.forward) && results[i].mismatches == 0 && results[i].gaps == 0,
          "%s, dtype %d, B=%d Hq=%d Hk=%d Sq=%d Sk=%d D=%d, %d to %d, %s: %s has error %.2e, %d mismatches, %d gaps",
          kernel, (int)q->dtype, (int)q->size[0], (int)q->size[1], (int)k->size[1], (int)q->size[2], (int)k->size[2],
          (int)q->size[3], (int)p->forward.mask.lowest, (int)p->forward.mask.highest, what, gradient_names[i],
          results[i].conditioned, results[i].mismatches, results[i].gaps);
}

/* Every kernel on one problem. */
static void check_problem(gradient_problem *p, const char *what) {
  const int count = p->args.forward.q.dtype == DHP_FLOAT64 ? 1 : test_kernel_count;
  for (int i = 0; i < count; i++) {
    gradients_poison(p);
    check(gradients_run(&test_kernels[i], p, NULL) == DHP_OK, "%s", test_kernels[i].instructions);
    check_results(p, test_kernels[i].instructions, what);
  }
}

static void check_shape(shape s, dhp_dtype dtype, memory_layout layout) {
  gradient_problem p = gradients_new(s, dtype, layout);
  check_problem(&p, "a shape");
  gradients_free(&p);
}

static void check_all_dtypes(shape s, memory_layout layout) {
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    check_shape(s, (dhp_dtype)dtype, layout);
}

static void test_shapes(void) {
  check_group("gradients: lengths and head_dim");
  static const int head_dims[] = {1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 80, 127, 129, 255, 256};
  for (int i = 0; i < (int)(sizeof head_dims / sizeof *head_dims); i++)
    for (int causal = 0; causal < 2; causal++)
      check_all_dtypes((shape){1, 1, 1, 1 + random_below(30), 1 + random_below(60), head_dims[i], causal, 5},
                       CONTIGUOUS);
  /* Around the tiles of 128 and 96 rows of either side, and the register blocks inside them. */
  static const int lengths[][2] = {{1, 1},    {1, 97},   {97, 1},   {3, 193},  {193, 3},  {16, 4},   {65, 127},
                                   {127, 12}, {128, 96}, {96, 128}, {129, 97}, {97, 129}, {200, 200}};
  for (int i = 0; i < (int)(sizeof lengths / sizeof *lengths); i++)
    for (int causal = 0; causal < 2; causal++)
      check_all_dtypes(
          (shape){1, 1, 1, lengths[i][0], lengths[i][1], 1 + random_below(30), causal, lengths[i][1] - lengths[i][0]},
          CONTIGUOUS);

  check_group("gradients: grouped heads and layouts");
  static const int heads[][2] = {{1, 1}, {2, 2}, {4, 2}, {6, 2}, {5, 1}};
  for (int i = 0; i < 5; i++)
    for (int layout = CONTIGUOUS; layout <= EXPANDED; layout++)
      check_all_dtypes((shape){2, heads[i][0], heads[i][1], 1 + random_below(110), 1 + random_below(40),
                               1 + random_below(40), i % 2, random_below(30)},
                       (memory_layout)layout);
}

static void test_masks_of_gradients(void) {
  check_group("gradients: causal offsets, rows that see nothing, keys that nobody sees");
  static const int64_t offsets[] = {0, 1, -1, 50, -50, 96, -96, 119, 500, -500, -139, -140, INT64_MAX, INT64_MIN};
  for (int i = 0; i < (int)(sizeof offsets / sizeof *offsets); i++) {
    check_all_dtypes((shape){1, 2, 1, 140, 120, 5, 1, offsets[i]}, CONTIGUOUS);
    check_all_dtypes((shape){1, 1, 1, 1, 120, 17, 1, offsets[i]}, CONTIGUOUS);
  }
  static const int64_t bands[][2] = {{20, 22}, {-40, 60}, {-3, -3}, {-150, -100}, {100, 180}, {5, 2}};
  for (int i = 0; i < 6; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++) {
      gradient_problem p =
          gradients_new_band((shape){1, 2, 1, 150, 210, 19, 0, 0}, bands[i][0], bands[i][1], (dhp_dtype)dtype, GAPS);
      check_problem(&p, "a window");
      gradients_free(&p);
    }
  check_group("gradients: empty tensors");
  for (int causal = 0; causal < 2; causal++) {
    check_all_dtypes((shape){2, 2, 1, 3, 0, 20, causal, 0}, CONTIGUOUS);
    check_all_dtypes((shape){2, 2, 1, 0, 3, 20, causal, 0}, CONTIGUOUS);
    check_all_dtypes((shape){0, 2, 1, 4, 3, 20, causal, 0}, CONTIGUOUS);
    check_all_dtypes((shape){2, 0, 1, 4, 3, 20, causal, 0}, CONTIGUOUS);
  }
}

static void test_options(void) {
  check_group("gradients: scales, without grad_lse");
  static const float scales[] = {0.f, 0.01f, 1.f, 3.f, 1e-30f};
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int i = 0; i < (dtype == DHP_FLOAT16 ? 4 : 5); i++) { /* gradients of 1e-30 are 0 in float16 */
      gradient_problem p = gradients_new((shape){1, 2, 1, 30, 60, 8, 1, 20}, (dhp_dtype)dtype, CONTIGUOUS);
      p.args.forward.scale = p.forward.args.scale = scales[i];
      if (i % 2) p.args.grad_lse = NULL;
      gradients_forward(&p);
      check_problem(&p, "another scale");
      gradients_free(&p);
    }

  check_group("gradients: what is not wanted changes no bit of the rest");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int k = 0; k < test_kernel_count; k++) {
      gradient_problem p = gradients_new((shape){1, 4, 2, 130, 140, 20, 1, 3}, (dhp_dtype)dtype, TRANSPOSED);
      gradient_problem some = gradients_new((shape){1, 4, 2, 130, 140, 20, 1, 3}, (dhp_dtype)dtype, TRANSPOSED);
      some.args.forward = p.args.forward;
      some.args.grad_out = p.args.grad_out;
      some.args.grad_lse = p.args.grad_lse;
      check(gradients_run(&test_kernels[k], &p, NULL) == DHP_OK, "all");
      for (int wanted = 0; wanted < 8; wanted++) {
        gradients_poison(&some);
        for (int i = 0; i < 3; i++)
          gradient(&some, i)->data = wanted >> i & 1 ? some.gradients[i].data : NULL;
        check(gradients_run(&test_kernels[k], &some, NULL) == DHP_OK, "some");
        for (int i = 0; i < 3; i++) {
          size_t written = 0;
          for (size_t byte = 0; byte < some.gradients[i].size; byte++)
            written += some.gradients[i].data[byte] != 0xa5;
          check(wanted >> i & 1 ? memcmp(some.gradients[i].data, p.gradients[i].data, p.gradients[i].size) == 0
                                : written == 0,
                "%s, dtype %d, wanted %d: %s", test_kernels[k].instructions, dtype, wanted, gradient_names[i]);
        }
      }
      gradients_free(&some);
      gradients_free(&p);
    }
}

static void test_accuracy(void) {
  check_group("gradients: accuracy over long rows");
  static const int head_dims[] = {64, 128, 256};
  for (int d = 0; d < 3; d++)
    for (int causal = 0; causal < 2; causal++) {
      const int length = causal ? 150 : 600;
      gradient_problem p =
          gradients_new((shape){1, 1, 1, length, length, head_dims[d], causal, 0}, DHP_FLOAT32, CONTIGUOUS);
      for (int k = 0; k < test_kernel_count; k++) {
        gradient_comparison results[3];
        check(gradients_run(&test_kernels[k], &p, NULL) == DHP_OK, "%s", test_kernels[k].instructions);
        gradients_compare(&p, results);
        for (int i = 0; i < 3; i++)
          check(results[i].relative <= 2e-6, "%s, D=%d, causal %d: %s has error %.2e", test_kernels[k].instructions,
                head_dims[d], causal, gradient_names[i], results[i].relative);
      }
      gradients_free(&p);
    }
}

void test_gradients(void) {
  test_shapes();
  test_masks_of_gradients();
  test_options();
  test_accuracy();
}
