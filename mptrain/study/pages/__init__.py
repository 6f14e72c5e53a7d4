"""Report pages about several runs."""
