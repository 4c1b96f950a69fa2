"""Containers: a Docker engine to use, and the image that brokers run from."""
