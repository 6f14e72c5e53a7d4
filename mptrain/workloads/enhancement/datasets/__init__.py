"""Data sets of photographs for image enhancement."""
