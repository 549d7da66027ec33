/* chip.h - what the host's plans know of the GPU. */
#ifndef DHP_CHIP_H
#define DHP_CHIP_H

/* Streaming multiprocessors of an H100 or H200 SXM. Only speed depends on it. */
enum { DHP_MULTIPROCESSORS = 132 };

#endif
