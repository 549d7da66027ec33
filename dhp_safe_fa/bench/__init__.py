"""Speed of the operator beside its peers: ``python -m dhp_safe_fa.bench`` (options: ``--help``).

Read in this order: cases (what), peers (against whom), reference (is it right), directions (what a direction is made
of), gradients/ and serving/ (those beside the forward), timing (how long), measurement (one case, everybody in turn),
sustained and meter (a second or more of each, with clock and power), results (what is kept), anchors (estimates), show/
(what is shown), __main__ (the command).

``measure(case, candidates)`` is the part for other tools.
"""

from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.measurement import Settings, WrongResult, measure
from dhp_safe_fa.bench.peers import Candidate, candidates
from dhp_safe_fa.bench.results import Result

__all__ = ["Candidate", "Case", "Result", "Settings", "WrongResult", "candidates", "measure"]
