"""Files of equal size that together are one sequence of bytes: of the plain commit log, and of each consume queue."""
