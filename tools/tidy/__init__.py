"""What the product consists of, in figures: ``python -m tools.tidy`` (``make tidy``)."""
