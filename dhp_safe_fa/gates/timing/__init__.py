"""The gate `timing`: no evidence in time (docs/gates-timing.md)."""
