"""Which metric is counted how, and how the gate treats it."""

from __future__ import annotations

INSTRUCTIONS = "smsp__inst_executed.sum"
OPCODES = "sass__inst_executed_per_opcode"
GUARDS = "sass__thread_inst_executed_true_per_opcode"
TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"

# Executed instructions, counted by the hardware: all must be exact in A/A.
DEMANDED = (
    INSTRUCTIONS,
    "smsp__thread_inst_executed.sum",
    "smsp__sass_branch_targets.sum",
    "smsp__sass_branch_targets_threads_divergent.sum",
)
# Exact or not: that is measured, and then they are judged as exact, or beside their spread in A/A. xbar2l1tex is what
# comes from L2, also by TMA; idc is the constant cache; what goes to other multiprocessors' memory is told by who sends
# it, atomics by L2, where one pass counts all that is sent.
CANDIDATES = (
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__m_xbar2l1tex_read_sectors.sum",
    "l1tex__m_l1tex2xbar_write_sectors_mem_dshared.sum",
    "lts__t_sectors_srcunit_tex_op_atom.sum",
    "lts__t_sectors_srcunit_tex_op_red.sum",
    "idc__requests.sum",
    REGISTERS,
)
# Not exact, but nearly so, and therefore a finding if classes differ by more percent than this, and by more than
# MERGED times what runs of the same input ever did. Sectors written to L2: neighbouring stores are merged or not as
# they happen to meet, never in 399,360 of a forward kernel's, 4.6 % where a kernel stores single numbers (delta), and
# 16 of the 32 that a control's clean twin writes (H200); the leaks that this metric alone sees write seven times as
# many.
MERGED = 2
PERCENT = " %"
WITHIN = {"lts__t_sectors_srcunit_tex_op_write.sum": 5.0}
# Counted in every look: what was executed is the same, whatever is in doubt.
IN_EVERY_LOOK = (INSTRUCTIONS,)
# Not exact, and only reported. Issued instructions contain replays; conflicts of stores to shared memory contain those
# with TMA, which come as chance has it (2 to 70 % in A/A on an H100); threads whose guard is on contain those that try
# once more for what has not arrived.
REPORTED = (
    TIME,
    "smsp__inst_issued.sum",
    "smsp__thread_inst_executed_pred_on.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
)
# By the hardware, on all shapes.
HARDWARE = (*DEMANDED, *CANDIDATES, *WITHIN, *REPORTED)
# By code that a profiler patches into the kernels, on one shape, because that takes a hundred times as long: how often
# each opcode was executed, and for how many threads while its guard was on. These have to be exact, too, but for
# guards of SYNCS: a kernel tries again for a tile only where it was not there, and how often that is follows from the
# clock, and so from the power that data draw.
PATCHED = (OPCODES, GUARDS)
_TRIES = (GUARDS, f"{GUARDS}:SYNCS")
# What only patched code can see.
PATCHED_CONTROLS = ("swapped_opcodes", "predicated_arithmetic", "exp2_denormal")

# A metric that counts nothing looks like one that counts the same for all: each has to see a leak that is there for it.
# There is none for registers, what goes to other multiprocessors, atomics and reductions.
ALIVE = {
    INSTRUCTIONS: "loop_bound",
    "smsp__thread_inst_executed.sum": "nan_early_out",
    "smsp__sass_branch_targets.sum": "branch_on_value",
    "smsp__sass_branch_targets_threads_divergent.sum": "branch_on_value",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "skip_small_p",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "secret_gather",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "predicated_store",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "scattered_store",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "bank_conflict",
    "l1tex__m_xbar2l1tex_read_sectors.sum": "secret_gather",
    "idc__requests.sum": "secret_constant",
    "lts__t_sectors_srcunit_tex_op_write.sum": "through_uniform",
    OPCODES: "swapped_opcodes",
    GUARDS: "predicated_arithmetic",
}


def base_of(metric: str) -> str:
    """Without the opcode."""
    return metric.partition(":")[0]


def is_reported(metric: str) -> bool:
    """Whether no kernel is judged by it."""
    return base_of(metric) in REPORTED or metric in _TRIES


def is_per_opcode(metric: str) -> bool:
    """Whether it comes as a total, and as METRIC:OPCODE."""
    return base_of(metric).endswith("_per_opcode")


def is_sum(metric: str) -> bool:
    """Whether those of several kernels are added up."""
    return metric.endswith(".sum") or is_per_opcode(metric)
