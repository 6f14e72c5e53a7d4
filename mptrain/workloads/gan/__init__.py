"""Generative adversarial networks (GANs) for images: the task with its two losses, and the DCGAN networks."""
