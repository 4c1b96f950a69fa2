"""RocketMQ 5's service for clients over gRPC: decodes calls, has ``rocketstore.broker`` carry them out, encodes."""
