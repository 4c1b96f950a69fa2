"""RocketMQ's hash index files, which find records by key."""
