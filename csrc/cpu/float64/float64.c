/* float64.c - attention and its gradients in float64, one output row at a time. */
#include "float64.h"

#include <string.h>

#include "../float_mode.h"
#include "numbers.h"

static double *row_of(const dhp_tensor *t, int64_t b, int64_t h, int64_t s) {
  return (double *)t->data + b * t->stride[0] + h * t->stride[1] + s * t->stride[2];
}

/* Four partial sums, each of every fourth product. CT: n is public. */
static double inner_product(const double *a, const double *b, int64_t n) {
  double sum[4] = {0.0};
  int64_t d = 0;
  for (; d + 4 <= n; d += 4)
    for (int u = 0; u < 4; u++)
      sum[u] += a[d + u] * b[d + u];
  for (; d < n; d++)
    sum[d % 4] += a[d] * b[d];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* to += factor * from. CT: n is public. */
static void add_multiple(double *to, double factor, const double *from, int64_t n) {
  for (int64_t d = 0; d < n; d++)
    to[d] += factor * from[d];
}

/* row = canonical factor * row. CT: straight-line but for the public n. */
static void finish_row(double *row, double factor, int64_t n) {
  for (int64_t d = 0; d < n; d++)
    row[d] = dhp_ct64_canonical(row[d] * factor);
}

/* ---- forward --------------------------------------------------------------------------------------------------- */

typedef struct job {
  const dhp_attention *args;
  const dhp_backward *backward; /* NULL in a forward */
  const dhp_mask *mask;
  dhp_cpu_places places;
} job;

/* Key or value j of a key head, wherever it lies. CT: pages are public. */
static const double *key_of(const job *work, const dhp_tensor *t, int64_t b, int64_t h, int64_t j) {
  const int32_t *const pages = work->places.pages;
  return pages ? row_of(t, pages[j / t->size[2]], h, j % t->size[2]) : row_of(t, b, h, j);
}

/* The score of a query and a key, capped if the call says so. CT: straight-line; what is divided is public. */
static double score_of(const dhp_attention *args, const double *q, const double *k) {
  const double product = inner_product(q, k, args->q.size[3]), cap = args->softcap;
  return cap > 0. ? cap * dhp_ct64_tanh(product * (args->scale / cap)) : args->scale * product;
}

/* Row i of head h: once over the keys for the maximum, once more for the sums. CT: what it sees is public. */
static void forward_row(const job *work, int64_t b, int64_t h, int64_t i) {
  const dhp_attention *const args = work->args;
  const int64_t value_dim = args->v.size[3], key_head = h / (args->q.size[1] / args->k.size[1]);
  const dhp_key_range seen = dhp_mask_row(work->mask, i);
  const double *const q = row_of(&args->q, b, h, i);
  const double sink = args->sinks ? ((const double *)args->sinks)[h] : -__builtin_inf();
  double *const out = row_of(&args->out, b, h, i), maximum = dhp_ct64_max(-__builtin_inf(), sink);
  for (int64_t j = seen.first; j < seen.last; j++)
    maximum = dhp_ct64_max(maximum, score_of(args, q, key_of(work, &args->k, b, key_head, j)));
  const double shift = dhp_ct64_select(dhp_ct64_is_finite(maximum), maximum, 0.0); /* as shift_of of the tile kernel */

  double sum = dhp_ct64_exp(sink - shift);
  memset(out, 0, (size_t)value_dim * sizeof *out);
  for (int64_t j = seen.first; j < seen.last; j++) {
    const double p = dhp_ct64_exp(score_of(args, q, key_of(work, &args->k, b, key_head, j)) - shift);
    sum += p;
    add_multiple(out, p, key_of(work, &args->v, b, key_head, j), value_dim);
  }
  const int is_seeing = seen.first < seen.last;
  if (is_seeing) finish_row(out, dhp_ct64_reciprocal(sum), value_dim);
  if (args->lse) {
    double *const lse = (double *)args->lse + (b * args->q.size[1] + h) * work->places.lse_pitch + i;
    *lse = is_seeing || args->sinks ? dhp_ct64_canonical(shift + dhp_ct64_log(sum)) : -__builtin_inf();
  }
}

/* ---- backward -------------------------------------------------------------------------------------------------- */

/* Query row i of head h. */
typedef struct query_row {
  const double *q, *grad_out;
  double lse, delta;
} query_row;

/* Where lse and grad_lse have query row i of head h. */
static int64_t lse_row(const job *work, int64_t b, int64_t h, int64_t i) {
  return (b * work->args->q.size[1] + h) * work->places.lse_pitch + i;
}

/* rowsum(grad_out * out) - grad_lse. CT: straight-line. */
static double delta_of(const job *work, int64_t b, int64_t h, int64_t i) {
  const dhp_backward *const args = work->backward;
  const dhp_tensor *const out = &args->forward.out;
  const double delta = inner_product(row_of(&args->grad_out, b, h, i), row_of(out, b, h, i), out->size[3]);
  return args->grad_lse ? delta - ((const double *)args->grad_lse)[lse_row(work, b, h, i)] : delta;
}

/* CT: straight-line. */
static query_row read_query(const job *work, int64_t b, int64_t h, int64_t i) {
  const dhp_backward *const args = work->backward;
  const dhp_attention *const forward = &args->forward;
  const double lse = ((const double *)forward->lse)[lse_row(work, b, h, i)];
  query_row row = {.q = row_of(&forward->q, b, h, i), .grad_out = row_of(&args->grad_out, b, h, i)};
  /* An infinite lse is a row of which a score was +inf, or all were -inf: its softmax is NaN. */
  row.lse = dhp_ct64_select(dhp_ct64_is_finite(lse), lse, __builtin_nan(""));
  row.delta = delta_of(work, b, h, i);
  return row;
}

/* What a query makes of a key: the probability p, and the gradient ds of its score. */
typedef struct weight {
  double p, ds;
} weight;

/* CT: straight-line; what is divided is public. */
static weight weight_of(const dhp_attention *args, const query_row *row, const double *k, const double *v) {
  const double score = score_of(args, row->q, k), p = dhp_ct64_exp(score - row->lse);
  const double ds = p * (inner_product(row->grad_out, v, args->v.size[3]) - row->delta);
  if (!(args->softcap > 0.)) return (weight){p, ds};
  const double tangent = score * (1.0 / args->softcap);
  return (weight){p, ds * (1.0 - tangent * tangent)};
}

static void query_gradient(const job *work, int64_t b, int64_t h, int64_t i) {
  const dhp_attention *const forward = work->args;
  const int64_t head_dim = forward->q.size[3], key_head = h / (forward->q.size[1] / forward->k.size[1]);
  const dhp_key_range seen = dhp_mask_row(work->mask, i);
  const query_row row = read_query(work, b, h, i);
  double *const dq = row_of(&work->backward->dq, b, h, i);
  memset(dq, 0, (size_t)head_dim * sizeof *dq);
  for (int64_t j = seen.first; j < seen.last; j++) {
    const double *const k = row_of(&forward->k, b, key_head, j);
    add_multiple(dq, weight_of(forward, &row, k, row_of(&forward->v, b, key_head, j)).ds, k, head_dim);
  }
  finish_row(dq, forward->scale, head_dim);
}

/* dk and dv, where wanted, of key j of key head h, over the heads that read it and the queries that see it. */
static void key_gradients(const job *work, int64_t b, int64_t h, int64_t j) {
  const dhp_attention *const forward = work->args;
  const int64_t head_dim = forward->q.size[3], value_dim = forward->v.size[3];
  const int64_t group = forward->q.size[1] / forward->k.size[1];
  const dhp_mask by_key = dhp_mask_transposed(work->mask);
  const dhp_key_range seen = dhp_mask_row(&by_key, j);
  const double *const k = row_of(&forward->k, b, h, j), *const v = row_of(&forward->v, b, h, j);
  double *const dk = work->backward->dk.data ? row_of(&work->backward->dk, b, h, j) : NULL;
  double *const dv = work->backward->dv.data ? row_of(&work->backward->dv, b, h, j) : NULL;
  if (dk) memset(dk, 0, (size_t)head_dim * sizeof *dk);
  if (dv) memset(dv, 0, (size_t)value_dim * sizeof *dv);
  for (int64_t query_head = h * group; query_head < (h + 1) * group; query_head++)
    for (int64_t i = seen.first; i < seen.last; i++) {
      const query_row row = read_query(work, b, query_head, i);
      const weight found = weight_of(forward, &row, k, v);
      if (dv) add_multiple(dv, found.p, row.grad_out, value_dim);
      if (dk) add_multiple(dk, found.ds, row.q, head_dim);
    }
  if (dk) finish_row(dk, forward->scale, head_dim);
  if (dv) finish_row(dv, 1.0, value_dim);
}

double dhp_float64_sink_gradient(const dhp_backward *args, int64_t b, int64_t h, int64_t first, int64_t count) {
  const job work = {&args->forward, args, NULL, {args->forward.out.size[2], NULL}};
  const double sink = ((const double *)args->forward.sinks)[h];
  double sum = 0.;
  for (int64_t i = first; i < first + count; i++) {
    const double lse = ((const double *)args->forward.lse)[lse_row(&work, b, h, i)];
    const uint64_t is_empty = dhp_ct64_mask(lse == -__builtin_inf());
    sum += dhp_ct64_select(is_empty, 0., -dhp_ct64_exp(sink - lse) * delta_of(&work, b, h, i));
  }
  return sum;
}

/* ---- rows of all heads and batches ------------------------------------------------------------------------------ */

static void run_rows(const job *work, const dhp_tensor *t, void (*row)(const job *, int64_t, int64_t, int64_t),
                     int64_t first, int64_t last) {
  const dhp_float_mode mode = dhp_float_mode_enter();
  for (int64_t n = first; n < last; n++)
    row(work, n / (t->size[1] * t->size[2]), n / t->size[2] % t->size[1], n % t->size[2]);
  dhp_float_mode_leave(mode);
}

static void forward_body(void *context, int64_t first, int64_t last) {
  const job *const work = context;
  run_rows(work, &work->args->q, forward_row, first, last);
}

static void query_body(void *context, int64_t first, int64_t last) {
  const job *const work = context;
  run_rows(work, &work->args->q, query_gradient, first, last);
}

static void key_body(void *context, int64_t first, int64_t last) {
  const job *const work = context;
  run_rows(work, &work->args->k, key_gradients, first, last);
}

static void run_all(job *work, const dhp_tensor *t, void (*body)(void *, int64_t, int64_t),
                    const dhp_executor *executor) {
  const int64_t count = t->size[0] * t->size[1] * t->size[2];
  if (executor)
    executor->run(executor->self, count, body, work);
  else
    body(work, 0, count);
}

void dhp_float64_forward(const dhp_attention *args, const dhp_mask *mask, const dhp_cpu_places *places,
                         const dhp_executor *executor) {
  job work = {args, NULL, mask, *places};
  run_all(&work, &args->q, forward_body, executor);
}

void dhp_float64_backward(const dhp_backward *args, const dhp_mask *mask, int64_t lse_pitch,
                          const dhp_executor *executor) {
  job work = {&args->forward, args, mask, {lse_pitch, NULL}};
  if (args->dq.data) run_all(&work, &args->forward.q, query_body, executor);
  if (args->dk.data || args->dv.data) run_all(&work, &args->forward.k, key_body, executor);
}
