"""Which addresses instructions may use, and which memory therefore stays public."""
