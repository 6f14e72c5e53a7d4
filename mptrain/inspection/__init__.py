"""Analysis of single steps and of run records for ``mptrain diagnose``, ``mptrain doctor`` and ``mptrain replay``."""
