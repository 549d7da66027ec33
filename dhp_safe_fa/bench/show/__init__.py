"""A report for the eye: tables and a summary for a terminal, and pictures."""
