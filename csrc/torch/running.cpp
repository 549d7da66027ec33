/*
 * running.cpp - see running.h.
 */
#include "running.h"

/* Lives in libtorch_cuda.so: absent, hence weak, where torch was built for CPUs only. */
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

namespace dhp {

namespace {

struct Range {
  void (*body)(void *, int64_t, int64_t);
  void *context;
};

void run_range(int64_t first, int64_t last, void *context) {
  const Range *range = static_cast<const Range *>(context);
  range->body(range->context, first, last);
}

void run(void *, int64_t count, void (*body)(void *, int64_t, int64_t), void *context) {
  Range range{body, context};
  const int64_t grain = 1; /* one work item a thread is worth a thread: an item is a whole tile of rows */
  check(torch_parallel_for(0, count, grain, run_range, &range));
}

} // namespace

const dhp_executor on_torch_threads{run, nullptr};

void *current_stream(const Tensor &q) {
  if (!aoti_torch_get_current_cuda_stream) fail("q: a CUDA tensor, but this torch was built without CUDA");
  void *stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(q.get_device_index(), &stream));
  return stream;
}

} // namespace dhp
