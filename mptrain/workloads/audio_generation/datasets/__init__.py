"""Recordings, and synthetic sounds."""
