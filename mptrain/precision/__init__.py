"""Precision of a training step: dtype policies, their application to a model and their check."""
