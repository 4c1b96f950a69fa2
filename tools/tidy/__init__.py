"""Figures about the sources: ``python -m tools.tidy`` (``make tidy``)."""
