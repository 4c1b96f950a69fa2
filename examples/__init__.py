"""Small programs to copy. Each runs by itself, with the packages installed: ``python examples/follow.py --help``."""
