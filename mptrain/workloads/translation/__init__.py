"""Workload of translation: data sets of sentence pairs, task, models and decoding."""
