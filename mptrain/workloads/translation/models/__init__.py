"""Translation models."""
