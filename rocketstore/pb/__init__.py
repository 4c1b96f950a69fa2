"""Generated from proto/apache: RocketMQ's messages for clients over gRPC. `make proto` writes it."""
