"""Report pages of what was examined."""
