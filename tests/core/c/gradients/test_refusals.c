/* test_refusals.c - csrc/check.c: what a backward refuses, and that the sentence names the argument. */
#include "../../../../csrc/check.h"

#include <string.h>

#include "../check.h"
#include "../test_cpu.h"
#include "gradients.h"

/* One thing that is wrong with a good call. */
typedef struct mistake {
  const char *argument, *text; /* how the sentence begins; what else is in it */
  void (*make)(dhp_backward *args);
} mistake;

static void no_lse(dhp_backward *args) { args->forward.lse = NULL; }
static void other_k(dhp_backward *args) { args->forward.k.size[2]++; }
static void bad_scale(dhp_backward *args) { args->forward.scale = -1.f; }
static void dtype_of_grad_out(dhp_backward *args) { args->grad_out.dtype = DHP_FLOAT32; }
static void unknown_dtype(dhp_backward *args) { args->grad_out.dtype = (dhp_dtype)4; }
static void shape_of_grad_out(dhp_backward *args) { args->grad_out.size[2]--; }
static void stride_of_grad_out(dhp_backward *args) { args->grad_out.stride[3] = 2; }
static void shape_of_dq(dhp_backward *args) { args->dq.size[1] = 2; }
static void shape_of_dk(dhp_backward *args) { args->dk.size[1] = 4; }
static void dtype_of_dv(dhp_backward *args) { args->dv.dtype = DHP_FLOAT64; }
static void stride_of_dv(dhp_backward *args) { args->dv.stride[3] = 0; }

static const mistake mistakes[] = {
    {"lse", "missing", no_lse},
    {"v", "[1, 2, 9, 8] differs from k's [1, 2, 10, 8]", other_k},
    {"scale", "-1", bad_scale},
    {"grad_out", "float32 differs from q's float16", dtype_of_grad_out},
    {"grad_out", "unknown dtype 4; supported: float32, float16, bfloat16, float64", unknown_dtype},
    {"grad_out", "[1, 4, 6, 8] differs from out's [1, 4, 7, 8]", shape_of_grad_out},
    {"grad_out", "stride 2", stride_of_grad_out},
    {"dq", "[1, 2, 7, 8] differs from q's [1, 4, 7, 8]", shape_of_dq},
    {"dk", "[1, 4, 9, 8] differs from k's [1, 2, 9, 8]", shape_of_dk},
    {"dv", "float64 differs from q's float16", dtype_of_dv},
    {"dv", "stride 0", stride_of_dv},
};

/* ---- the gradient of sinks ------------------------------------------------------------------------------------- */

typedef struct sinks_mistake {
  const char *text;
  dhp_status status;
  void (*make)(dhp_sinks_backward *args);
  int on_cuda;
} sinks_mistake;

static void none(dhp_sinks_backward *args) { (void)args; }
static void sinks_without_lse(dhp_sinks_backward *args) { args->lse = NULL; }
static void without_sinks(dhp_sinks_backward *args) { args->sinks = NULL; }
static void other_dtype(dhp_sinks_backward *args) { args->grad_out.dtype = DHP_FLOAT32; }
static void other_shape(dhp_sinks_backward *args) { args->grad_out.size[2]++; }
static void other_stride(dhp_sinks_backward *args) { args->out.stride[3] = 2; }
static void wide(dhp_sinks_backward *args) { args->out.size[3] = args->grad_out.size[3] = 257; }

static const sinks_mistake sinks_mistakes[] = {
    {"lse: missing", DHP_INVALID_ARGUMENT, sinks_without_lse, 0},
    {"sinks: missing", DHP_INVALID_ARGUMENT, without_sinks, 0},
    {"grad_out: dtype float32 differs from out's float16; they must agree", DHP_INVALID_ARGUMENT, other_dtype, 0},
    {"grad_out: shape [1, 4, 8, 8] differs from out's [1, 4, 7, 8]", DHP_INVALID_ARGUMENT, other_shape, 0},
    {"out: stride 2 of the last dimension", DHP_INVALID_ARGUMENT, other_stride, 0},
    {"out: head_dim 257; supported on CPU: 1 to 256", DHP_UNSUPPORTED, wide, 0},
    {"sinks: a gradient; supported on CUDA: none", DHP_UNSUPPORTED, none, 1},
};

static void test_refusals_of_sinks(void) {
  gradient_problem p = gradients_new((shape){1, 4, 2, 7, 9, 8, 0, 0}, DHP_FLOAT16, CONTIGUOUS);
  float sinks[4] = {0.f}, dsinks[4];
  const dhp_sinks_backward good = gradients_of_sinks(&p, sinks, dsinks);
  dhp_error error;
  check(dhp_check_sinks_gradient(&good, 0, &error) == DHP_OK, "a good call: %s", error.text);
  for (size_t i = 0; i < sizeof sinks_mistakes / sizeof *sinks_mistakes; i++) {
    dhp_sinks_backward args = good;
    sinks_mistakes[i].make(&args);
    error.text[0] = '\0';
    const dhp_status status = dhp_check_sinks_gradient(&args, sinks_mistakes[i].on_cuda, &error);
    check(status == sinks_mistakes[i].status && strstr(error.text, sinks_mistakes[i].text) == error.text,
          "mistake %d of sinks: status %d, \"%s\"", (int)i, (int)status, error.text);
  }
  gradients_free(&p);
}

void test_refusals(void) {
  check_group("gradients: refusals");
  gradient_problem p = gradients_new((shape){1, 4, 2, 7, 9, 8, 0, 0}, DHP_FLOAT16, CONTIGUOUS);
  dhp_error error;
  check(dhp_check_gradients(&p.args, &error) == DHP_OK, "a good call: %s", error.text);
  for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
    dhp_backward args = p.args;
    mistakes[i].make(&args);
    error.text[0] = '\0';
    const dhp_status status = dhp_check_gradients(&args, &error);
    const size_t name = strlen(mistakes[i].argument);
    check(status == DHP_INVALID_ARGUMENT && strncmp(error.text, mistakes[i].argument, name) == 0 &&
              error.text[name] == ':' && strstr(error.text, mistakes[i].text),
          "mistake %d: status %d, \"%s\"", (int)i, (int)status, error.text);
  }
  dhp_backward unwanted = p.args; /* of a gradient that is not wanted nothing is asked */
  shape_of_dq(&unwanted);
  stride_of_dv(&unwanted);
  unwanted.dq.data = unwanted.dv.data = NULL;
  check(dhp_check_gradients(&unwanted, &error) == DHP_OK, "not wanted: %s", error.text);
  gradients_free(&p);
  test_refusals_of_sinks();
}
