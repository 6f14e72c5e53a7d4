"""Networks that enhance pictures."""
