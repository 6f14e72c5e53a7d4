"""Checks of ``mptrain doctor``: the machine, the files of a data set, and the first training step of a model."""
