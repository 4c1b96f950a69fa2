"""Threads, and nothing but threads: they step the parts of ``dledger.core`` and carry out what those ask for."""
