"""Verifies a stopped broker's directory against its log."""
