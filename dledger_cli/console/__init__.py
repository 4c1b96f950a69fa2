"""The web console: a sampler that polls the nodes, a small server that publishes the results, and a page."""

from typing import Final

CONSOLE_PACKAGES: Final = ("starlette", "uvicorn")
"""The extra ``console``."""
