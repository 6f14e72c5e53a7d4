"""Image code that several workloads share: files, decoding, cropping, augmentation, and classifier features."""
