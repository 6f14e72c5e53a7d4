"""Number formats that a network can be trained in, told by its gradients with its products in each."""
