"""Recordings and synthetic sounds."""
