"""Topics, subscription groups, consumer offsets, delay progress: replicated, because they are messages of the log."""
