"""The burn loop: ``python -m dhp_safe_fa.burn`` (options: ``--help``; the method: docs/burn.md).

Read in this order: loop (the steps), verdict (the decision), records (the log). Then what a step needs: builds and
library with abi (a build, kept and called), gating (the gates), profiling with launch (counters), measuring (times),
chip (the machine and its floors), milestones, stored and quoted (what came before the loop), show and plot, __main__.
"""
