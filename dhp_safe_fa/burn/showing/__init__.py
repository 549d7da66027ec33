"""The log for a reader: tables, and the journey as a picture (plot)."""
