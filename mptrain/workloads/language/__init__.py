"""Workload of language modelling: data sets of text, task and models that predict the next token."""
