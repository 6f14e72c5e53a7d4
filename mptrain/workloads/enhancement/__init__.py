"""Enhancement of pictures: denoising and super-resolution."""
