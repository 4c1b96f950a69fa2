"""Groups of nodes and of brokers on this machine: real processes, their directories, ports and certificates."""
