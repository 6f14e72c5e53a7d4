"""Workload of raw-audio generation: data sets, task and models that predict a sound sample by sample (WaveNet)."""
