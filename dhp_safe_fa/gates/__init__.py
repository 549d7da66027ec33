"""Security gates: programs that try to show that a kernel's behaviour depends on its data, and prove that they could.

``python -m dhp_safe_fa.gates sass`` analyses machine code (docs/gates-sass.md); for that, nothing here needs torch or a
GPU. ``counters``, ``bitwise`` and ``timing`` execute kernels (docs/gates.md): verdict.py, subjects.py, inputs.py and
planted.py are what they share. registry.py lists the gates, provenance.py what takes part in a verdict, and
without_comments.py reads it; these import no other module of the gates.
"""
