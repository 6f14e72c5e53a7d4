"""Data sets of raw audio: recordings of the user, Asterisk's telephone prompts, and synthetic sounds."""
