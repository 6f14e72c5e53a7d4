"""Recordings for several workloads: readers of audio files, and alphabets for their transcripts."""
