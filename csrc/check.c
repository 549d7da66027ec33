/*
 * check.c - what every way of running a call demands of its arguments. Below the entry points and the plans; knows no
 * backend, and reads no element.
 */
#include "check.h"

#include <float.h>
#include <stdio.h>

#include "error.h"

enum {
  /* i + causal_offset and the end of its tile of queries (192 rows at most) stay inside int32 */
  MAX_SEQLEN = (1 << 30) - 256
};

const char *dhp_dtype_name(dhp_dtype dtype) {
  static const char *const names[] = {"float32", "float16", "bfloat16", "float64"};
  return (unsigned)dtype < sizeof names / sizeof *names ? names[dtype] : "unknown";
}

/* How the caller wrote the shape of a tensor [B, H, S, D]. */
typedef enum form {
  BATCHED, /* [B, H, S, D] */
  PACKED,  /* [S, H, D] */
  PAGED    /* [B, S, H, D] */
} form;

typedef struct shape_text {
  char text[96]; /* four int64, their brackets and commas */
} shape_text;

static shape_text shape_of(const dhp_tensor *t, form given) {
  const long long b = t->size[0], h = t->size[1], s = t->size[2], d = t->size[3];
  shape_text shape;
  if (given == PACKED)
    snprintf(shape.text, sizeof shape.text, "[%lld, %lld, %lld]", s, h, d);
  else
    snprintf(shape.text, sizeof shape.text, "[%lld, %lld, %lld, %lld]", b, given == PAGED ? s : h,
             given == PAGED ? h : s, d);
  return shape;
}

#define SHAPE "%s"
#define SIZES(t) shape_of(&(t), given).text

/* Sizes are not negative, and a dimension that has neighbours has a usable stride. */
static dhp_status check_tensor(const char *name, const dhp_tensor *t, dhp_dtype dtype, form given, dhp_error *error) {
  if ((unsigned)t->dtype > DHP_FLOAT64)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: unknown dtype %d; supported: float32, float16, bfloat16, float64",
                    name, (int)t->dtype);
  if (t->dtype != dtype)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: dtype %s differs from q's %s; they must agree", name,
                    dhp_dtype_name(t->dtype), dhp_dtype_name(dtype));
  for (int i = 0; i < 4; i++)
    if (t->size[i] < 0)
      return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: negative size in shape " SHAPE, name, SIZES(*t));
  if (t->size[3] > 1 && t->stride[3] != 1)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: stride %lld of the last dimension; it must be contiguous", name,
                    (long long)t->stride[3]);
  return DHP_OK;
}

/* `given`: how q and out are written; `keys`: how k and v are. Pages belong to no batch. */
static dhp_status check_call(const dhp_attention *args, form given, form keys, dhp_error *error) {
  const dhp_tensor *const q = &args->q, *const k = &args->k, *const v = &args->v, *const out = &args->out;
  const char *const names[] = {"q", "k", "v", "out"};
  const dhp_tensor *const tensors[] = {q, k, v, out};
  for (int i = 0; i < 4; i++) {
    const dhp_status status =
        check_tensor(names[i], tensors[i], q->dtype, tensors[i] == k || tensors[i] == v ? keys : given, error);
    if (status != DHP_OK) return status;
  }
  for (int i = 0; i < 3; i++)
    if (k->size[i] != v->size[i])
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "v: shape " SHAPE " differs from k's " SHAPE "; they must be equal but for head_dim",
                      shape_of(v, keys).text, shape_of(k, keys).text);
  for (int i = 0; i < 4; i++)
    if (out->size[i] != (i == 3 ? v : q)->size[i])
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "out: shape " SHAPE " differs from q's " SHAPE " with v's head_dim %lld; they must be equal",
                      shape_of(out, given).text, shape_of(q, given).text, (long long)v->size[3]);
  if (keys != PAGED && k->size[0] != q->size[0])
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "k: batch %lld differs from q's batch %lld (k " SHAPE ", q " SHAPE ")",
                    (long long)k->size[0], (long long)q->size[0], shape_of(k, keys).text, shape_of(q, given).text);
  if (k->size[3] != q->size[3])
    return dhp_fail(error, DHP_INVALID_ARGUMENT,
                    "k: head_dim %lld differs from q's head_dim %lld (k " SHAPE ", q " SHAPE ")", (long long)k->size[3],
                    (long long)q->size[3], shape_of(k, keys).text, shape_of(q, given).text);
  if (q->size[3] < 1 || v->size[3] < 1)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: head_dim 0 in shape " SHAPE "; supported: 1 to %d",
                    q->size[3] < 1 ? "q" : "v", (q->size[3] < 1 ? shape_of(q, given) : shape_of(v, keys)).text,
                    DHP_CPU_MAX_HEAD_DIM);
  if (k->size[1] < 1 || q->size[1] % k->size[1] != 0)
    return dhp_fail(error, DHP_INVALID_ARGUMENT,
                    "k: %lld key heads for %lld query heads; the number of query heads must be a multiple of it "
                    "(k " SHAPE ", q " SHAPE ")",
                    (long long)k->size[1], (long long)q->size[1], shape_of(k, keys).text, shape_of(q, given).text);
  if (q->size[2] > MAX_SEQLEN || k->size[2] > MAX_SEQLEN)
    return dhp_fail(error, DHP_UNSUPPORTED, "%s: sequence length %lld; supported: up to %d",
                    q->size[2] > MAX_SEQLEN ? "q" : "k", (long long)(q->size[2] > MAX_SEQLEN ? q->size[2] : k->size[2]),
                    MAX_SEQLEN);
  if (args->is_windowed && (args->window_left < -1 || args->window_right < -1))
    return dhp_fail(error, DHP_INVALID_ARGUMENT,
                    "window: (%lld, %lld); supported: on each side -1 (no bound) or a number of keys, not negative",
                    (long long)args->window_left, (long long)args->window_right);
  if (!args->is_causal && !args->is_windowed && args->causal_offset != 0)
    return dhp_fail(error, DHP_INVALID_ARGUMENT,
                    "causal_offset: %lld without is_causal or a window; supported: 0, or is_causal=True or a window "
                    "with it",
                    (long long)args->causal_offset);
  if (!(args->scale >= 0. && args->scale <= 0x1p100))
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "scale: %g; supported: 0 to 2^100", args->scale);
  /*
   * float32 calls use q scale / softcap and softcap log2(e); with 2^100, 2^27 is left for q. Where the tangent's
   * argument would be subnormal it is 0, an error of 2^-126 softcap in a score: 2^-26 for the largest one.
   */
  const int is_wide = q->dtype == DHP_FLOAT64;
  const double softcap = args->softcap, most = is_wide ? DBL_MAX : 0x1p100;
  if (softcap != 0. && !(softcap >= DBL_MIN && softcap <= most && args->scale / softcap <= most))
    return dhp_fail(error, DHP_INVALID_ARGUMENT,
                    "softcap: %g; supported: 0 for none, or positive and normal, with softcap and scale / softcap %s",
                    softcap, is_wide ? "finite" : "no more than 2^100");
  return DHP_OK;
}

static dhp_status check_cpu_head_dim(const char *name, const dhp_tensor *t, dhp_error *error) {
  if (t->size[3] > DHP_CPU_MAX_HEAD_DIM)
    return dhp_fail(error, DHP_UNSUPPORTED, "%s: head_dim %lld; supported on CPU: 1 to %d", name, (long long)t->size[3],
                    DHP_CPU_MAX_HEAD_DIM);
  return DHP_OK;
}

dhp_status dhp_check_cpu_head_dims(const dhp_attention *args, dhp_error *error) {
  const dhp_status status = check_cpu_head_dim("q", &args->q, error);
  return status == DHP_OK ? check_cpu_head_dim("v", &args->v, error) : status;
}

dhp_status dhp_check_cuda_widths(const dhp_attention *args, dhp_error *error) {
  if (args->v.size[3] != args->q.size[3])
    return dhp_fail(
        error, DHP_UNSUPPORTED,
        "v: head_dim %lld differs from q's %lld; supported on CUDA: equal ones; dhp_safe_fa's functions fill "
        "multiples of 8 up to %d with zeros, but not in pages",
        (long long)args->v.size[3], (long long)args->q.size[3], dhp_cuda_max_head_dim());
  return DHP_OK;
}

dhp_status dhp_check_cuda_call(const dhp_attention *args, dhp_error *error) {
  if (args->q.dtype != DHP_FLOAT16 && args->q.dtype != DHP_BFLOAT16)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: dtype %s; supported on CUDA: float16, bfloat16",
                    dhp_dtype_name(args->q.dtype));
  if (args->softcap != 0.)
    return dhp_fail(error, DHP_UNSUPPORTED, "softcap: %g; supported on CUDA: none, " DHP_BY_PACKED, args->softcap);
  if (args->sinks) return dhp_fail(error, DHP_UNSUPPORTED, "sinks: given; supported on CUDA: None, " DHP_BY_PACKED);
  const dhp_status status = dhp_check_cuda_widths(args, error);
  if (status != DHP_OK) return status;
  if (dhp_kernel_count() == 0)
    return dhp_fail(error, DHP_NO_GPU, "this build has no GPU kernels: nvcc was not found when it was built");
  const int64_t head_dim = args->q.size[3];
  if (head_dim > dhp_cuda_max_head_dim() || head_dim % 8 != 0)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: head_dim %lld; supported on CUDA: a multiple of 8 up to %d",
                    (long long)head_dim, dhp_cuda_max_head_dim());
  return DHP_OK;
}

dhp_status dhp_check_cuda_heads(const dhp_attention *args, dhp_error *error) {
  const int64_t batch = args->q.size[0], heads = args->q.size[1];
  if (batch > DHP_CUDA_MAX_ITEMS || heads > DHP_CUDA_MAX_ITEMS || batch * heads > DHP_CUDA_MAX_ITEMS)
    return dhp_fail(error, DHP_UNSUPPORTED, "q: batch %lld times heads %lld; supported on CUDA: up to %d together",
                    (long long)batch, (long long)heads, DHP_CUDA_MAX_ITEMS);
  return DHP_OK;
}

dhp_status dhp_check_arguments(const dhp_attention *args, dhp_error *error) {
  return check_call(args, BATCHED, BATCHED, error);
}

dhp_status dhp_check_packed(const dhp_attention *packed, int is_paged, dhp_error *error) {
  return check_call(packed, PACKED, is_paged ? PAGED : PACKED, error);
}

/* A gradient, or the gradient of an output, is like the tensor that it belongs to. */
static dhp_status check_like(const char *name, const dhp_tensor *t, const char *model_name, const dhp_tensor *model,
                             form given, dhp_error *error) {
  const dhp_status status = check_tensor(name, t, model->dtype, given, error);
  if (status != DHP_OK) return status;
  for (int i = 0; i < 4; i++)
    if (t->size[i] != model->size[i])
      return dhp_fail(error, DHP_INVALID_ARGUMENT,
                      "%s: shape " SHAPE " differs from %s's " SHAPE "; they must be equal", name, SIZES(*t),
                      model_name, SIZES(*model));
  return DHP_OK;
}

static dhp_status check_gradients(const dhp_backward *args, form given, dhp_error *error) {
  const dhp_attention *const forward = &args->forward;
  dhp_status status = check_call(forward, given, given, error);
  if (status != DHP_OK) return status;
  if (!forward->lse)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "lse: missing; the gradients are computed from the forward's lse");
  status = check_like("grad_out", &args->grad_out, "out", &forward->out, given, error);
  if (status != DHP_OK) return status;
  const char *const names[] = {"dq", "dk", "dv"}, *const model_names[] = {"q", "k", "v"};
  const dhp_tensor *const tensors[] = {&args->dq, &args->dk, &args->dv};
  const dhp_tensor *const models[] = {&forward->q, &forward->k, &forward->v};
  for (int i = 0; i < 3 && status == DHP_OK; i++)
    if (tensors[i]->data) status = check_like(names[i], tensors[i], model_names[i], models[i], given, error);
  return status;
}

dhp_status dhp_check_gradients(const dhp_backward *args, dhp_error *error) {
  return check_gradients(args, BATCHED, error);
}

dhp_status dhp_check_packed_gradients(const dhp_backward *args, dhp_error *error) {
  return check_gradients(args, PACKED, error);
}

dhp_status dhp_check_sinks_gradient(const dhp_sinks_backward *args, int on_cuda, dhp_error *error) {
  const dhp_tensor *const out = &args->out, *const grad_out = &args->grad_out;
  dhp_status status = check_tensor("out", out, out->dtype, BATCHED, error);
  if (status != DHP_OK) return status;
  if (grad_out->dtype != out->dtype)
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "grad_out: dtype %s differs from out's %s; they must agree",
                    dhp_dtype_name(grad_out->dtype), dhp_dtype_name(out->dtype));
  status = check_like("grad_out", grad_out, "out", out, BATCHED, error);
  if (status != DHP_OK) return status;
  if (!args->lse || (!args->sinks && out->size[1] > 0))
    return dhp_fail(error, DHP_INVALID_ARGUMENT, "%s: missing; the gradient is computed from it",
                    args->lse ? "sinks" : "lse");
  if (on_cuda) return dhp_fail(error, DHP_UNSUPPORTED, "sinks: a gradient; supported on CUDA: none");
  return check_cpu_head_dim("out", out, error);
}
