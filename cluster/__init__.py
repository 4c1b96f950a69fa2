"""Tools to deploy and operate groups: the command line, the console, metrics, drills, the demo and local groups."""
