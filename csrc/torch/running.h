/*
 * running.h - torch's threads and streams for the C core.
 */
#ifndef DHP_TORCH_RUNNING_H
#define DHP_TORCH_RUNNING_H

#include "tensors.h"

namespace dhp {

/* dhp_executor over torch's own thread pool. */
extern const dhp_executor on_torch_threads;

/* The current stream of the device of q, a CUDA tensor. */
void *current_stream(const Tensor &q);

} // namespace dhp

#endif
