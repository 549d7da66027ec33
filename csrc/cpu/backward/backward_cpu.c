/* backward_cpu.c - gradients on the CPU: through float64 copies of the tensors. */
#include "backward_cpu.h"

#include <stdlib.h>

#include "../../error.h"
#include "../convert.h"
#include "../float64/float64.h"

static size_t elements(const dhp_tensor *t) { return (size_t)(t->size[0] * t->size[1] * t->size[2] * t->size[3]); }

static size_t offset(const dhp_tensor *t, size_t n) {
  const size_t d = n % (size_t)t->size[3], s = n / (size_t)t->size[3];
  const size_t row = s % (size_t)t->size[2], h = s / (size_t)t->size[2];
  return (h / (size_t)t->size[1]) * (size_t)t->stride[0] + h % (size_t)t->size[1] * (size_t)t->stride[1] +
         row * (size_t)t->stride[2] + d;
}

/* Contiguous, float64, holding 0. */
static int make_copy(const dhp_tensor *t, dhp_tensor *copy) {
  *copy = *t;
  copy->dtype = DHP_FLOAT64;
  copy->stride[3] = 1;
  for (int i = 2; i >= 0; i--)
    copy->stride[i] = copy->stride[i + 1] * copy->size[i + 1];
  copy->data = calloc(elements(t) + 1, sizeof(double));
  return copy->data != NULL;
}

static void widen(const dhp_tensor *t, const dhp_tensor *copy) {
  for (size_t n = 0; n < elements(t); n++) {
    const size_t at = offset(t, n);
    double *const to = (double *)copy->data + n;
    if (t->dtype == DHP_FLOAT32)
      *to = (double)((const float *)t->data)[at];
    else if (t->dtype == DHP_FLOAT16)
      *to = (double)dhp_float16_to_float32(((const uint16_t *)t->data)[at]);
    else
      *to = (double)dhp_bfloat16_to_float32(((const uint16_t *)t->data)[at]);
  }
}

static void narrow(const dhp_tensor *t, const dhp_tensor *copy) {
  for (size_t n = 0; n < elements(t); n++) {
    const size_t at = offset(t, n);
    const float x = dhp_ct_canonical((float)((const double *)copy->data)[n]);
    if (t->dtype == DHP_FLOAT32)
      ((float *)t->data)[at] = x;
    else
      ((uint16_t *)t->data)[at] =
          (uint16_t)(t->dtype == DHP_FLOAT16 ? dhp_float32_to_float16(x) : dhp_float32_to_bfloat16(x));
  }
}

dhp_status dhp_cpu_backward(const dhp_backward *args, const dhp_executor *executor, dhp_error *error) {
  const dhp_mask mask = dhp_mask_of(&args->forward);
  if (args->forward.q.dtype == DHP_FLOAT64) {
    dhp_float64_backward(args, &mask, executor);
    return DHP_OK;
  }
  dhp_backward wide = *args;
  const dhp_tensor *const tensors[] = {&args->forward.q, &args->forward.k, &args->forward.v, &args->forward.out,
                                       &args->grad_out,  &args->dq,        &args->dk,        &args->dv};
  dhp_tensor *const copies[] = {&wide.forward.q, &wide.forward.k, &wide.forward.v, &wide.forward.out,
                                &wide.grad_out,  &wide.dq,        &wide.dk,        &wide.dv};
  const dhp_tensor *const q = &args->forward.q;
  const size_t rows = (size_t)(q->size[0] * q->size[1] * q->size[2]);
  double *const lse = malloc((rows + 1) * sizeof *lse), *const grad_lse = malloc((rows + 1) * sizeof *grad_lse);
  int made = lse && grad_lse;
  for (int i = 0; i < 8; i++)
    if (tensors[i]->data && made) made = make_copy(tensors[i], copies[i]);
  if (!made) return dhp_fail(error, DHP_OUT_OF_MEMORY, "no memory for float64 copies");
  for (size_t i = 0; i < rows; i++) {
    lse[i] = (double)((const float *)args->forward.lse)[i];
    if (args->grad_lse) grad_lse[i] = (double)((const float *)args->grad_lse)[i];
  }
  wide.forward.lse = lse;
  if (args->grad_lse) wide.grad_lse = grad_lse;
  for (int i = 0; i < 5; i++)
    widen(tensors[i], copies[i]);
  dhp_float64_backward(&wide, &mask, executor);
  for (int i = 0; i < 8; i++)
    if (tensors[i]->data) {
      if (i >= 5) narrow(tensors[i], copies[i]);
      free(copies[i]->data);
    }
  free(lse);
  free(grad_lse);
  return DHP_OK;
}
