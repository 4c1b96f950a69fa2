"""Threads, and nothing else: they step the parts of ``dledger.core`` and carry out their effects."""
