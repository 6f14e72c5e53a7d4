"""The training engine: step, loop, evaluation and checkpoints. It must not depend on Hydra or on the terminal."""
