/* kernel.cpp - a forward kernel, with the constants of one choice, as a function of a launch's arguments. */
#include "attention_fwd.cu"

char shared[1]; /* never touched: addresses are numbers here */

extern "C" void run_kernel(void **arguments) {
  dhp_attention_fwd(*(const CUtensorMap *)arguments[0], *(const CUtensorMap *)arguments[1],
                    *(const CUtensorMap *)arguments[2], *(const dhp_fwd_params *)arguments[3]);
}
