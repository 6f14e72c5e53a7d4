"""Recipes: published claims as sets of runs with expected results, which ``mptrain reproduce`` trains and judges."""
