"""Topics, subscription groups, consumer offsets and delay progress, replicated as messages of the log."""
