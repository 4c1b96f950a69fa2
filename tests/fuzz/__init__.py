"""Whatever comes is taken, refused with a typed error, or repaired: nothing else. ``FUZZ=100``: so many times more."""
