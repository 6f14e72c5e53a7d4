"""Recordings for several workloads: readers, and alphabets of transcripts."""
