"""Drivers of the systems that our figures are compared with; nothing that people deploy imports them."""
