"""RocketMQ's name server: brokers register with it, clients ask it where the queues of a topic are."""
