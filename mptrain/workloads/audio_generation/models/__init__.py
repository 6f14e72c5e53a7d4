"""WaveNet."""
