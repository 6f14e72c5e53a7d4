"""Image data sets with class labels, in memory (such as CIFAR-10) or in folders of files (such as ImageNet)."""
