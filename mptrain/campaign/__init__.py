"""Runs as wholes: one attempt at one run, evaluating a saved one, the points of a sweep."""
