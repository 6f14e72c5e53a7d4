"""Runs training: the step, the loop, evaluation, checkpoints. Knows neither Hydra nor the terminal."""
