"""Data sets of labelled text."""
