"""Shared by the commands of all packages: values of options, contexts, and the page and charts of a report."""
