"""Compares runs: reads their directories, aligns them, and decides what their numbers show.

Reads records only; trains nothing, prints nothing, and never imports torch.
"""
