"""Sequences of bytes in files of equal size, used by the plain commit log and by each consume queue."""
