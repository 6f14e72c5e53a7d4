"""Data sets of text for language models."""
