"""Text for several workloads: tokens, subwords, and sequences of different lengths."""
