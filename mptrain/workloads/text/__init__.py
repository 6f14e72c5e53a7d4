"""Text for several workloads: tokens, subwords, and batches of sequences of different lengths."""
