"""RocketMQ's message store and a broker over it, on a plain commit log or on a replicated one."""
