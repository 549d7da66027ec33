"""The gate `counters`: what is executed is the same on every input (docs/gates.md)."""
