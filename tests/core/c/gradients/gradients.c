#include "gradients.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../../csrc/cpu/float64/float64.h"
#include "../check.h"

const char *const gradient_names[3] = {"dq", "dk", "dv"};

/* ---- problems -------------------------------------------------------------------------------------------------- */

dhp_tensor *gradient(gradient_problem *p, int which) {
  dhp_tensor *const all[] = {&p->args.dq, &p->args.dk, &p->args.dv};
  return all[which];
}

void gradients_poison(gradient_problem *p) {
  for (int i = 0; i < 3; i++)
    memset(p->gradients[i].data, 0xa5, p->gradients[i].size);
}

void gradients_forward(gradient_problem *p) {
  dhp_cpu_kernel kernels[3];
  dhp_cpu_kernels(kernels);
  if (p->forward.args.q.dtype == DHP_FLOAT64)
    dhp_float64_forward(&p->forward.args, &p->forward.mask, &p->forward.places, NULL);
  else if (dhp_cpu_forward_with(&kernels[0], &p->forward.args, &p->forward.mask, NULL, NULL) != DHP_OK)
    abort();
}

gradient_problem gradients_new_band(shape s, int64_t lowest, int64_t highest, dhp_dtype dtype, memory_layout layout) {
  gradient_problem p = {.forward = problem_new(s, dtype, layout)};
  p.forward.mask = dhp_mask_band(s.queries, s.keys, lowest, highest);
  p.args.grad_out = strided(s.batch, s.heads, s.queries, s.head_dim, dtype, layout);
  p.args.dq = strided(s.batch, s.heads, s.queries, s.head_dim, dtype, layout);
  p.args.dk = p.args.dv = strided(s.batch, s.key_heads, s.keys, s.head_dim, dtype, layout);
  p.grad_out = storage_new(&p.args.grad_out);
  fill_normal(&p.args.grad_out, p.grad_out);
  for (int i = 0; i < 3; i++)
    p.gradients[i] = storage_new(gradient(&p, i));
  const size_t rows = (size_t)(s.batch * s.heads * s.queries);
  p.grad_lse = malloc((rows + 1) * sizeof(double));
  if (!p.grad_lse) abort();
  for (size_t i = 0; i < rows; i++)
    if (dtype == DHP_FLOAT64)
      ((double *)p.grad_lse)[i] = random_normal();
    else
      ((float *)p.grad_lse)[i] = (float)random_normal();
  gradients_forward(&p);
  p.args.forward = p.forward.args;
  p.args.grad_lse = p.grad_lse;
  gradients_poison(&p);
  return p;
}

gradient_problem gradients_new(shape s, dhp_dtype dtype, memory_layout layout) {
  const dhp_attention args = {.q.size = {0, 0, s.queries, 0},
                              .k.size = {0, 0, s.keys, 0},
                              .is_causal = s.is_causal,
                              .causal_offset = s.causal_offset};
  const dhp_mask mask = dhp_mask_of(&args);
  return gradients_new_band(s, mask.lowest, mask.highest, dtype, layout);
}

void gradients_free(gradient_problem *p) {
  problem_free(&p->forward);
  free(p->grad_out.data);
  free(p->grad_lse);
  for (int i = 0; i < 3; i++)
    free(p->gradients[i].data);
}

dhp_status gradients_run(const dhp_cpu_kernel *kernel, const gradient_problem *p, const dhp_executor *executor) {
  if (p->args.forward.q.dtype == DHP_FLOAT64) {
    dhp_float64_backward(&p->args, &p->forward.mask, p->forward.places.lse_pitch, executor);
    return DHP_OK;
  }
  return dhp_cpu_backward_with(kernel, &p->args, &p->forward.mask, executor, NULL);
}

dhp_sinks_backward gradients_of_sinks(const gradient_problem *p, const void *sinks, void *dsinks) {
  return (dhp_sinks_backward){.out = p->args.forward.out,
                              .grad_out = p->args.grad_out,
                              .lse = p->args.forward.lse,
                              .grad_lse = p->args.grad_lse,
                              .sinks = sinks,
                              .dsinks = dsinks};
}

/* ---- the definition -------------------------------------------------------------------------------------------- */

static double dot(const double *a, const double *b, int64_t n) {
  double sum = 0.0;
  for (int64_t d = 0; d < n; d++)
    sum += a[d] * b[d];
  return sum;
}

static double dot_of_magnitudes(const double *a, const double *b, int64_t n) {
  double sum = 0.0;
  for (int64_t d = 0; d < n; d++)
    sum += fabs(a[d] * b[d]);
  return sum;
}

/* Inputs, gradients, and the gradients with every term and factor replaced by its magnitude; [B, H, S, D] each. */
typedef struct numbers {
  double *q, *k, *v, *grad_out, *gradients[3], *magnitudes[3];
} numbers;

/* p: probabilities of query i, 0 where it sees nothing; returns the number of keys that it sees. */
static int softmax_of(const gradient_problem *whole, int64_t i, const double *q, const double *k, double *p) {
  const int64_t keys = whole->args.forward.k.size[2], head_dim = whole->args.forward.q.size[3];
  double maximum = -HUGE_VAL, sum = 0.0;
  int visible = 0;
  for (int64_t j = 0; j < keys; j++) {
    p[j] = 0.0;
    if (!is_visible(&whole->forward.mask, i, j)) continue;
    visible++;
    p[j] = dot(q, k + j * head_dim, head_dim) * (double)whole->args.forward.scale;
    if (p[j] > maximum) maximum = p[j];
  }
  const double shift = isinf(maximum) ? 0.0 : maximum;
  for (int64_t j = 0; j < keys; j++)
    if (is_visible(&whole->forward.mask, i, j)) sum += p[j] = exp(p[j] - shift);
  const double lse = shift + log(sum);
  for (int64_t j = 0; j < keys; j++) /* an infinite lse is a row without a softmax */
    if (is_visible(&whole->forward.mask, i, j)) p[j] = isfinite(lse) ? p[j] / sum : (double)NAN;
  return visible;
}

/* Adds what query row i of a head contributes; q_row, k_row: of which rows in `all` its query and first key are. */
static void add_row(const gradient_problem *whole, int64_t i, int64_t q_row, int64_t k_row, double grad_lse,
                    const numbers *all, double *p) {
  const int64_t keys = whole->args.forward.k.size[2], n = whole->args.forward.q.size[3];
  const double scale = (double)whole->args.forward.scale;
  const double *const q = all->q + q_row * n, *const g = all->grad_out + q_row * n;
  const double *const k = all->k + k_row * n, *const v = all->v + k_row * n;
  if (softmax_of(whole, i, q, k, p) == 0) return;
  double out[256] = {0.0};
  for (int64_t j = 0; j < keys; j++)
    for (int64_t d = 0; d < n && is_visible(&whole->forward.mask, i, j); d++)
      out[d] += p[j] * v[j * n + d];
  const double delta = dot(g, out, n) - grad_lse;
  const double delta_magnitude = dot_of_magnitudes(g, out, n) + fabs(grad_lse);
  for (int64_t j = 0; j < keys; j++) {
    if (!is_visible(&whole->forward.mask, i, j)) continue;
    const double ds = p[j] * (dot(g, v + j * n, n) - delta);
    const double magnitude = p[j] * (dot_of_magnitudes(g, v + j * n, n) + delta_magnitude);
    for (int64_t d = 0; d < n; d++) {
      const int64_t to_query = q_row * n + d, to_key = (k_row + j) * n + d;
      all->gradients[0][to_query] += scale * ds * k[j * n + d];
      all->gradients[1][to_key] += scale * ds * q[d];
      all->gradients[2][to_key] += p[j] * g[d];
      all->magnitudes[0][to_query] += fabs(scale * magnitude * k[j * n + d]);
      all->magnitudes[1][to_key] += fabs(scale * magnitude * q[d]);
      all->magnitudes[2][to_key] += fabs(p[j] * g[d]);
    }
  }
}

/* ---- comparison ------------------------------------------------------------------------------------------------ */

static gradient_comparison compare_one(const dhp_tensor *t, const double *expected, const double *magnitudes) {
  const size_t count = (size_t)(t->size[0] * t->size[1] * t->size[2] * t->size[3]);
  double *const got = decode(t), error = 0.0, reference = 0.0, magnitude = 0.0;
  gradient_comparison result = {0};
  for (size_t i = 0; i < count; i++) {
    if (!isfinite(got[i]) || !isfinite(expected[i])) {
      result.mismatches += isnan(expected[i]) ? !isnan(got[i]) : got[i] != expected[i];
      continue;
    }
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    reference += expected[i] * expected[i];
    magnitude += magnitudes[i] * magnitudes[i];
  }
  result.relative = error > 0.0 ? sqrt(error / reference) : 0.0;
  result.conditioned = error > 0.0 ? sqrt(error / magnitude) : 0.0;
  free(got);
  return result;
}

void gradients_compare(gradient_problem *p, gradient_comparison results[3]) {
  const dhp_attention *const forward = &p->args.forward;
  const int64_t *const n = forward->q.size, *const m = forward->k.size;
  numbers all = {.q = decode(&forward->q),
                 .k = decode(&forward->k),
                 .v = decode(&forward->v),
                 .grad_out = decode(&p->args.grad_out)};
  for (int i = 0; i < 3; i++) {
    const int64_t *const size = gradient(p, i)->size;
    const size_t count = (size_t)(size[0] * size[1] * size[2] * size[3] + 1);
    all.gradients[i] = calloc(count, sizeof(double));
    all.magnitudes[i] = calloc(count, sizeof(double));
    if (!all.gradients[i] || !all.magnitudes[i]) abort();
  }
  double *const probabilities = malloc((size_t)(m[2] + 1) * sizeof *probabilities);
  if (!probabilities) abort();
  for (int64_t row = 0; row < n[0] * n[1] * n[2]; row++) {
    const int64_t b = row / (n[1] * n[2]), key_head = row / n[2] % n[1] / (n[1] / m[1]);
    double grad_lse = 0.0;
    if (p->args.grad_lse)
      grad_lse = forward->q.dtype == DHP_FLOAT64 ? ((const double *)p->args.grad_lse)[row]
                                                 : (double)((const float *)p->args.grad_lse)[row];
    add_row(p, row % n[2], row, (b * m[1] + key_head) * m[2], grad_lse, &all, probabilities);
  }
  for (int i = 0; i < 3; i++) {
    results[i] = (gradient_comparison){0};
    if (gradient(p, i)->data) {
      results[i] = compare_one(gradient(p, i), all.gradients[i], all.magnitudes[i]);
      results[i].gaps = gaps_touched(gradient(p, i), p->gradients[i]);
    }
    free(all.gradients[i]);
    free(all.magnitudes[i]);
  }
  free(probabilities);
  free(all.q);
  free(all.k);
  free(all.v);
  free(all.grad_out);
}
