"""Studies with a plan that is committed before their first run, and the results of that run."""
