/* softmax_params.h - the scale of the scores, as the host prepares it for the kernels. All public. */
#ifndef DHP_SOFTMAX_PARAMS_H
#define DHP_SOFTMAX_PARAMS_H

/*
 * Fields of a family's parameter struct. Not a struct within it: nvcc would order the loads of all parameters
 * otherwise, and ptxas would then find fewer uniform registers for the loop.
 *
 * scale, scale_log2: the softmax scale, and the same times log2(e). highest_score: its product with scale_log2, or the
 * next power of two, is finite. scale_to_power_of_two: what has to be added to scale_log2 to make it the next power of
 * two.
 */
#define DHP_SOFTMAX_PARAMS \
  float scale, scale_log2; \
  float highest_score;     \
  float scale_to_power_of_two;

#endif
