"""Generates the references of settings, requests and metrics in ``docs`` from the code (``make docs``).

Defaults, limits and meanings of settings come from the records, from the errors that their ``problems()`` reports for
invalid values, and from the docstrings below the fields. So a new setting appears the next time the reference is
generated, and ``make check`` fails until then.
"""
