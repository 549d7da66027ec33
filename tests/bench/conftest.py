"""Fixtures of the benchmark's tests."""

from fake_gpu import gpu

__all__ = ["gpu"]
