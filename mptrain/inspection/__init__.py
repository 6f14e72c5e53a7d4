"""Looks into steps and records on request: diagnose, doctor, replay, and the remedies that they try."""
