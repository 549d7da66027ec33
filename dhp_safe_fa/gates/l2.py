"""How gates empty the L2."""

from __future__ import annotations

import torch
from torch import Tensor

# In multiples of its size: lines are not replaced in the order in which they came.
_TIMES = 2


def eviction_buffer() -> Tensor:
    """Memory that leaves nothing else in the L2 once it is written."""
    size = torch.cuda.get_device_properties().L2_cache_size
    return torch.empty(_TIMES * size, dtype=torch.uint8, device="cuda")
