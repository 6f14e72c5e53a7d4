"""Image code that several workloads share: data sets, decoding of files, crops, augmentation, classifier features."""
