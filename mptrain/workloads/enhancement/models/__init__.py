"""Networks that enhance pictures: EDSR for super-resolution, DnCNN for denoising."""
