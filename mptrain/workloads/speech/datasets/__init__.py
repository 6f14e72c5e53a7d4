"""Recordings with transcripts."""
