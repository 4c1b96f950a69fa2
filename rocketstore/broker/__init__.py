"""The broker: the gRPC server for producers, consumers and administrators."""
