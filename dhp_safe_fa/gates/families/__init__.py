"""How the gates put the kernels of each family of csrc/families under test: a module of its name, `subject(kernel)`.

kernel: a dict of ``dhp_safe_fa._inspect.kernels()``. Returns a ``subjects.Subject``; NotRun says why there is none.
"""
