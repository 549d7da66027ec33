"""Sliding windows, soft caps and sinks: their cases and who computes them."""
