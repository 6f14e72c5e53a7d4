"""Read-only observation of training steps: causes of overflows, exponent histograms, operators and module calls."""
