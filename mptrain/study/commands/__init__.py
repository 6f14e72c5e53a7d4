"""Commands about several runs."""
