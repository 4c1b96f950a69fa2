"""The commit log, plain or replicated; the rest of the store uses only ``port.CommitLog``."""
