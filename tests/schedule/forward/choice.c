/*
 * choice.c - about how many cycles the plan of a forward expects of a call, over all kernels of this family: the fewest
 * without splitting key segments, and with; and whether it splits them. Reads calls, as test_dealing.py has them.
 */
#include <stdio.h>

#include "../../../csrc/families/forward/plan.c"

static dhp_tensor contiguous(int64_t batch, int64_t heads, int64_t length, int64_t head_dim) {
  return (dhp_tensor){.size = {batch, heads, length, head_dim},
                      .stride = {heads * length * head_dim, length * head_dim, head_dim, 1},
                      .dtype = DHP_BFLOAT16};
}

int main(void) {
  long long b, hq, hk, sq, sk, d, causal, offset, left, right;
  while (scanf("%lld %lld %lld %lld %lld %lld %lld %lld %lld %lld", &b, &hq, &hk, &sq, &sk, &d, &causal, &offset, &left,
               &right) == 10) {
    dhp_attention args = {.q = contiguous(b, hq, sq, d),
                          .scale = 1.,
                          .is_causal = (int)causal,
                          .causal_offset = offset,
                          .is_windowed = left >= 0 || right >= 0,
                          .window_left = left,
                          .window_right = right};
    args.out = args.q;
    args.k = args.v = contiguous(b, hk, sk, d);
    dhp_plan plan;
    dhp_error error;
    if (dhp_plan_attention(&args, &plan, &error) != DHP_OK) {
      fprintf(stderr, "%s\n", error.text);
      return 1;
    }
    const dhp_mask mask = dhp_mask_of(&args);
    const int head_dim = plan.kernel->head_dim;
    double whole = INFINITY, split = INFINITY;
    for (int i = 0; i < dhp_family_forward.count; i++) {
      const dhp_kernel_info *const kernel = &dhp_family_forward.kernels[i];
      if (kernel->dtype != args.q.dtype || kernel->head_dim != head_dim || strcmp(kernel->part, plan.kernel->part) != 0)
        continue;
      const work w = work_of(&args, &mask, kernel);
      if (kernel->is_short && w.segments > 1) continue;
      whole = fmin(whole, cost_of(&w, kernel));
      split = fmin(split, cost_of_split(&w, kernel));
    }
    printf("%d %d %.17g %.17g\n", dhp_decode_is_planned(&plan), plan.splits, whole, split);
  }
  return 0;
}
