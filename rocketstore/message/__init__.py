"""Messages and their encoding."""
