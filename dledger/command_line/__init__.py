"""Shared by the commands of all packages: values of options, contexts, missing packages, a report's page and charts."""
