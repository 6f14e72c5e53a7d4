"""Image classification: the task (cross-entropy and accuracy) and the models, from small networks to torchvision's."""
