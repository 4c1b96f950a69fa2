"""The broker: what producers, consumers and administrators talk to, over gRPC."""
