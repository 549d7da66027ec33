"""The burn loop: ``python -m dhp_safe_fa.burn`` (options: ``--help``; the method: docs/burn.md).

Read in this order: loop (the steps), verdict (the decision), log/ (what is written down). Then what a step needs:
families (what the loop has to know of a kernel family), builds/, measuring/, and showing/ for __main__.
"""
