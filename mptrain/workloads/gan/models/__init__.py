"""DCGAN."""
