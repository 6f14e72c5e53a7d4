"""Regression: numbers to predict for each sample."""
