"""``python -m cluster.bench``."""

from cluster.bench.main import command

if __name__ == "__main__":
    command()
