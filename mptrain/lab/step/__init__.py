"""Measurements of one training step in several precisions, on which doctor and diagnose build."""
