"""Messages and their byte form."""
