"""Workload of image enhancement: super-resolution and denoising of photographs."""
