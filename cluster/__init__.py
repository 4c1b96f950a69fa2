"""What people deploy and operate: the command line, the demo, local groups and the benchmarks."""
