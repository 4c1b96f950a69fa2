"""Which records carry a key: RocketMQ's hash index files."""
