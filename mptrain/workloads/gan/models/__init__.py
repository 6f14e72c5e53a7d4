"""Networks of the GAN task."""
