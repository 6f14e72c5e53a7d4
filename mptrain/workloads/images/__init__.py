"""Images for several workloads: files, decoding, cropping, augmentation, and the features of a classifier."""
