"""Translators."""
