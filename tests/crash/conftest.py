"""Directories for several tests or examples lie where those of single tests do."""

from tests.support.memory_factory import tmp_path_factory as tmp_path_factory
