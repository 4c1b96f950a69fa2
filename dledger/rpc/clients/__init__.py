"""What clients ask of a node: gRPC services on one event loop, within bounds."""
