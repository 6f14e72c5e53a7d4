"""Image classifiers: functions that build a network for the classes, channels and size of a data set's images.

A network maps images ``[N, in_channels, image_size, image_size]`` to logits ``[N, num_classes]``.
"""
