"""Data sets of sentence pairs for translation."""
