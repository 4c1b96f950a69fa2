"""Between members: votes, heartbeats, pushes, and the log that repairs itself from peers."""
