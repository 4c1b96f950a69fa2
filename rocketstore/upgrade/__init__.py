"""From plain brokers to a group: comparing and aligning old logs, and what a directory's contents mean here."""
