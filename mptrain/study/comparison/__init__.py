"""Comparison of training runs, such as FP16 against FP32: a verdict on each configuration against a reference.

An arm is all runs of one configuration, one per seed. The package reads run directories, pairs the runs of two arms by
seed, and decides whether an arm is better, equivalent or worse. It reads records only, trains nothing, prints nothing,
and never imports torch.
"""
