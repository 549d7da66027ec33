// control: expects sass=blind counters=blind bitwise=caught timing=blind
// A sum starts from what its memory happened to hold: for the bitwise gate, which poisons outputs, to catch.

extern "C" __global__ void leak(const float *secret, float *out) { out[threadIdx.x] += secret[threadIdx.x]; }

extern "C" __global__ void clean(const float *secret, float *out) { out[threadIdx.x] = secret[threadIdx.x]; }
