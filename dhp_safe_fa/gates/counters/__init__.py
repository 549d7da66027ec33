"""The gate `counters`: Nsight Compute counts the same on every input (docs/gates.md)."""
