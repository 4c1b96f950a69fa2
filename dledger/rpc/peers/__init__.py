"""Between members: votes, heartbeats, pushes, and log bytes for repairs."""
