"""Documentation made from the code: the settings, the commands and the metrics in ``docs``; ``make docs`` writes it.

Nothing here knows a single setting's default, limit or meaning: they come from the records, from what their
``problems()`` say about odd values, and from the docstrings below the fields. So a new setting is in the reference the
next time that it is made, and ``make check`` fails until it is.
"""
