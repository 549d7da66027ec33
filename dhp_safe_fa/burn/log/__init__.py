"""The log of iterations: what a line holds (records, milestones), how it is read (lines, decode), the file of lines,
and what was measured outside the loop (stored, quoted).
"""
