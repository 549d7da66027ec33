"""What transformers calls its cache, among arguments and results: another name from 5.24 on."""

from __future__ import annotations

import inspect

import pytest

masking_utils = pytest.importorskip("transformers.masking_utils")

CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
