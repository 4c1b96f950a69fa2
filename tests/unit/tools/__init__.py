"""The repository's tools."""
