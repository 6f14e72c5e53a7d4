"""Recipes: their format, their expectations, and their reproduction."""
