"""The broker over gRPC: decodes requests, calls the broker, encodes answers."""
