"""RocketMQ's name server: brokers register with it, and clients look up the routes of topics."""
