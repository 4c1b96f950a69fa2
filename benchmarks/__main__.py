"""``python -m benchmarks``."""

from benchmarks.main import command

if __name__ == "__main__":
    command()
