"""Drivers of the systems that our figures are compared with; no deployed code imports them."""
