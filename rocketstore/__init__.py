"""RocketMQ's message store, and a broker for it, on a plain or a replicated commit log."""
