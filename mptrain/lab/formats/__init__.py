"""Which number formats a network can be trained in, from its gradients when its products are computed in each."""
