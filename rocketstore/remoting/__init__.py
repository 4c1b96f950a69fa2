"""RocketMQ's remoting protocol (4.x): frames, headers, bodies, servers and clients. Knows nothing of brokers."""
