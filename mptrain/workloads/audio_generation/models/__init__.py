"""Models of raw audio: WaveNet."""
