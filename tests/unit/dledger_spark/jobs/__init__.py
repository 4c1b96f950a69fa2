"""What jobs share, and what of them is arithmetic."""
