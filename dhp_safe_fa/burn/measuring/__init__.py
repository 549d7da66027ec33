"""What an iteration is measured by: gates (gating), counters (profiling), times (blocks) and the machine (chip)."""
