"""The commit log, plain or replicated; ``port.CommitLog`` is what the rest of the store knows of either."""
