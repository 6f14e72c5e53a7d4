"""Text processing shared by workloads: tokens, subwords, text files, and batches of sequences of different lengths."""
