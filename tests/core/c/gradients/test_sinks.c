/* test_sinks.c - the gradient of sinks, against its definition over what a call was given: out and lse as they are. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "../test_cpu.h"
#include "gradients.h"

enum { MOST_HEADS = 6 };

/* One number a head or a row, in the dtype of lse. */
static double number(const void *numbers, dhp_dtype dtype, int64_t i) {
  return dtype == DHP_FLOAT64 ? ((const double *)numbers)[i] : (double)((const float *)numbers)[i];
}

static void set_number(void *numbers, dhp_dtype dtype, int64_t i, double value) {
  if (dtype == DHP_FLOAT64)
    ((double *)numbers)[i] = value;
  else
    ((float *)numbers)[i] = (float)value;
}

/* dsinks[h], and what its rounding errors scale with. */
static double expected_of(const dhp_sinks_backward *args, int64_t h, double *magnitude) {
  const int64_t *const n = args->out.size;
  const dhp_dtype dtype = args->out.dtype;
  const double sink = number(args->sinks, dtype, h);
  double sum = 0.0;
  *magnitude = 0.0;
  for (int64_t b = 0; b < n[0]; b++)
    for (int64_t i = 0; i < n[2]; i++) {
      const int64_t row = (b * n[1] + h) * n[2] + i;
      const double lse = number(args->lse, dtype, row);
      double gradient = args->grad_lse ? number(args->grad_lse, dtype, row) : 0.0, terms = fabs(gradient);
      for (int64_t d = 0; d < n[3]; d++) {
        const double product = get(&args->grad_out, b, h, i, d) * get(&args->out, b, h, i, d);
        gradient -= product;
        terms += fabs(product);
      }
      if (lse == -HUGE_VAL) continue; /* nothing is there, not even the sink */
      sum += exp(sink - lse) * gradient;
      if (exp(sink - lse) > 0.0) *magnitude += exp(sink - lse) * terms * (1.0 + fabs(sink - lse));
    }
  return sum;
}

static void check_sinks(const dhp_cpu_kernel *kernel, const dhp_sinks_backward *args, const char *what) {
  const dhp_dtype dtype = args->out.dtype;
  const double allowed = dtype == DHP_FLOAT64 ? 1e-15 : 1e-6;
  dhp_error error = {""};
  memset(args->dsinks, 0xa5, MOST_HEADS * sizeof(double));
  check(dhp_cpu_sinks_backward_with(kernel, args, NULL, &error) == DHP_OK, "%s: %s", kernel->instructions, error.text);
  for (int64_t h = 0; h < args->out.size[1]; h++) {
    double magnitude;
    const double expected = expected_of(args, h, &magnitude), got = number(args->dsinks, dtype, h);
    check(isfinite(expected) ? fabs(got - expected) <= allowed * magnitude
                             : (isnan(expected) ? isnan(got) : got == expected),
          "%s, dtype %d, %s, head %d: %.9g, not %.9g, magnitude %.3g", kernel->instructions, (int)dtype, what, (int)h,
          got, expected, magnitude);
  }
}

/* Of a problem whose lse gets the sink as a term. */
static void check_shape(shape s, dhp_dtype dtype, memory_layout layout, const char *what) {
  gradient_problem p = gradients_new(s, dtype, layout);
  double sinks[MOST_HEADS], dsinks[MOST_HEADS];
  for (int64_t h = 0; h < s.heads; h++)
    set_number(sinks, dtype, h, 2.0 * random_normal());
  p.forward.args.sinks = sinks;
  gradients_forward(&p);
  dhp_sinks_backward args = gradients_of_sinks(&p, sinks, dsinks);
  for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++) {
    args.grad_lse = p.grad_lse;
    check_sinks(&test_kernels[k], &args, what);
    args.grad_lse = NULL;
    check_sinks(&test_kernels[k], &args, "without grad_lse");
  }
  gradients_free(&p);
}

static void test_shapes(void) {
  check_group("gradient of sinks: shapes, layouts, rows without keys");
  static const shape shapes[] = {
      {1, 1, 1, 1, 5, 1, 0, 0},      {2, 4, 2, 127, 33, 16, 1, -5}, {1, 2, 1, 128, 40, 7, 0, 0},
      {3, 6, 3, 129, 20, 64, 1, 0},  {1, 3, 1, 300, 10, 97, 1, -9}, {2, 2, 2, 17, 0, 8, 0, 0},
      {0, 2, 1, 5, 5, 8, 0, 0},      {2, 2, 1, 0, 5, 8, 0, 0},      {2, 0, 1, 4, 5, 8, 0, 0},
      {1, 1, 1, 40, 40, 256, 1, -8},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
      check_shape(shapes[i], (dhp_dtype)dtype, (memory_layout)(i % 3), "a shape");
}

static void test_many_rows(void) {
  check_group("gradient of sinks: 100000 rows");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    check_shape((shape){2, 2, 1, 50000, 1, 8, 0, 0}, (dhp_dtype)dtype, CONTIGUOUS, "many rows");
}

static void test_special_numbers(void) {
  check_group("gradient of sinks: NaN, infinity, nothing");
  static const double values[] = {0.5, -1000.0, -HUGE_VAL, HUGE_VAL, (double)NAN};
  enum { VALUES = sizeof values / sizeof *values };
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int sink = 0; sink < VALUES; sink++)
      for (int lse = 0; lse < VALUES; lse++)
        for (int spoilt = 0; spoilt < 3; spoilt++) { /* nothing, grad_out, grad_lse */
          gradient_problem p = gradients_new((shape){1, 1, 1, 9, 3, 5, 0, 0}, (dhp_dtype)dtype, CONTIGUOUS);
          double sinks[MOST_HEADS], dsinks[MOST_HEADS];
          set_number(sinks, (dhp_dtype)dtype, 0, values[sink]);
          set_number(p.forward.lse, (dhp_dtype)dtype, 4, values[lse]);
          if (spoilt == 1) set(&p.args.grad_out, 0, 0, 4, 2, (double)NAN);
          if (spoilt == 2) set_number(p.grad_lse, (dhp_dtype)dtype, 4, HUGE_VAL);
          const dhp_sinks_backward args = gradients_of_sinks(&p, sinks, dsinks);
          for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++)
            check_sinks(&test_kernels[k], &args, "a special number");
          gradients_free(&p);
        }
}

static void test_bits(void) {
  check_group("gradient of sinks: other heads change no bit");
  for (int dtype = DHP_FLOAT32; dtype <= DHP_FLOAT64; dtype++)
    for (int k = 0; k < (dtype == DHP_FLOAT64 ? 1 : test_kernel_count); k++) {
      gradient_problem p = gradients_new((shape){1, 3, 1, 300, 7, 20, 0, 0}, (dhp_dtype)dtype, TRANSPOSED);
      const int64_t number_size = dtype == DHP_FLOAT64 ? 8 : 4;
      double sinks[MOST_HEADS] = {0}, dsinks[MOST_HEADS], alone[MOST_HEADS];
      dhp_sinks_backward args = gradients_of_sinks(&p, sinks, dsinks);
      check(dhp_cpu_sinks_backward_with(&test_kernels[k], &args, NULL, NULL) == DHP_OK, "all heads");
      dhp_tensor *const tensors[] = {&args.out, &args.grad_out};
      for (int i = 0; i < 2; i++) { /* the second head */
        const int64_t element = dtype == DHP_FLOAT64 ? 8 : dtype == DHP_FLOAT32 ? 4 : 2;
        tensors[i]->data = (char *)tensors[i]->data + tensors[i]->stride[1] * element;
        tensors[i]->size[1] = 1;
      }
      args.lse = (const char *)args.lse + 300 * number_size;
      args.grad_lse = (const char *)args.grad_lse + 300 * number_size;
      args.dsinks = alone;
      check(dhp_cpu_sinks_backward_with(&test_kernels[k], &args, NULL, NULL) == DHP_OK, "one head");
      check(memcmp(alone, (char *)dsinks + number_size, (size_t)number_size) == 0, "%s, dtype %d",
            test_kernels[k].instructions, dtype);
      gradients_free(&p);
    }
}

void test_sinks(void) {
  test_shapes();
  test_many_rows();
  test_special_numbers();
  test_bits();
}
