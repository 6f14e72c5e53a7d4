"""Photographs."""
