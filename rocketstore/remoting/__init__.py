"""RocketMQ's remoting protocol (4.x): frames, headers, bodies, servers and clients. Independent of brokers."""
