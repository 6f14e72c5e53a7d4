"""Distributed training: launch of ranks, collectives, gradient synchronisation and sharding."""
