"""Local groups of nodes and brokers: real processes, their directories, ports and certificates."""
