"""Messages that are delivered at a time of their own: taking them in, delivering, recalling."""
