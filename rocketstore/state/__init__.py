"""Topics, subscription groups, consumer offsets and delay progress: replicated, because they are messages of the log."""
