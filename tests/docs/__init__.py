"""What the documents claim, checked against the code."""
