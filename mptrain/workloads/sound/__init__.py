"""Recordings for several workloads: reading them, and the letters of their transcripts."""
