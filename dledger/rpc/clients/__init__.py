"""The services that a node offers to clients: gRPC on one event loop, within bounds."""
