"""Many runs: the points of a sweep, the processes or jobs that train them, and comparisons as sweeps."""
