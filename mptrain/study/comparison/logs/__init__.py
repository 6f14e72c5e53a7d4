"""Comparison of training runs by the logs that any framework or tracker wrote, without configurations or seeds."""
