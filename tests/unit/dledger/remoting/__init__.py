"""Tests of the remoting layer: frames, connections, servers and clients."""
