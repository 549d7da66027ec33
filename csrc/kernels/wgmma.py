"""The text of wgmma.h: the matrix products of one kernel, as functions over register arrays.

An inline-asm statement must name each of its up to 128 accumulator registers, so the text is generated.
PTX ISA 9.0, section 9.7.15.5 (wgmma.mma_async).
"""

from __future__ import annotations


def descriptor_high(group_bytes: int) -> int:
    """High half of a shared memory matrix descriptor (9.7.15.5.1.2): 128-byte swizzle (bit 62), and bytes, in units of
    16, from one group of eight rows of 128 bytes to the next."""
    return 1 << 30 | group_bytes >> 4


# Groups that lie one after the other.
GROUP_BYTES = 1024

PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}


def product(
    name: str,
    comment: str,
    n: int,
    dtype: str,
    a_group_bytes: int | None,
    transpose_b: bool,
    fresh: bool = False,
    high_is_given: bool = False,
) -> str:
    """One m64nNk16 product d = a * b + (accumulate ? d : 0); a thread holds n / 2 floats of d. Matrices in shared
    memory are given by the low half of their descriptor. a_group_bytes: None if a is in registers. fresh: d is written
    only, and the product not to be called with accumulate. high_is_given: that half of descriptors of GROUP_BYTES is a
    parameter; a constant is built anew for every product."""
    floats = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(floats))
    if a_group_bytes is None:
        a_parameter, a_operands = "const uint32_t *a", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
        a_text, a_setup = "{" + ", ".join(f"%{floats + i}" for i in range(4)) + "}", ""
        a_count, immediates = 4, f"1, 1, {int(transpose_b)}"
    else:
        a_parameter, a_operands, a_text = "uint32_t a", '"r"(a)', "a"
        a_setup = f".reg .b64 a; mov.b64 a, {{%{floats}, {descriptor_high(a_group_bytes)}}};\\n"
        a_count, immediates = 1, f"1, 1, 0, {int(transpose_b)}"
    b = floats + a_count
    high, high_parameter, high_operand = str(descriptor_high(GROUP_BYTES)), "", ""
    if high_is_given:
        high, high_parameter, high_operand = f"%{b + 2}", ", uint32_t high", ', "r"(high)'
        if a_group_bytes == GROUP_BYTES:
            a_setup = f".reg .b64 a; mov.b64 a, {{%{floats}, {high}}};\\n"
    ptx = PTX_TYPE[dtype]
    outputs = ", ".join(f'"{"=" if fresh else "+"}f"(d[{i}])' for i in range(floats))
    return f"""/* {comment} */
static __device__ __forceinline__ void {name}(float *d, {a_parameter}, uint32_t b, int accumulate{high_parameter}) {{
  asm volatile(
      "{{.reg .pred accumulate; setp.ne.b32 accumulate, %{b + 1}, 0;\\n"
      ".reg .b64 b; mov.b64 b, {{%{b}, {high}}};\\n{a_setup}"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{{accumulators}}}, {a_text}, b, "
      "accumulate, {immediates};}}\\n"
      : {outputs}
      : {a_operands}, "r"(b), "r"(accumulate){high_operand});
}}
"""


def header(*products: str) -> str:
    """The text of wgmma.h for one kernel."""
    high = f"#define DESCRIPTOR_HIGH {descriptor_high(GROUP_BYTES)}u /* of groups that lie one after the other */\n"
    return "\n".join(("#include <stdint.h>\n", high, *products))
