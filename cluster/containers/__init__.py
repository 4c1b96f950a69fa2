"""Containers: a Docker engine to talk to, and the image that brokers run from."""
