"""Networks of the GAN task: generators and discriminators of images."""
