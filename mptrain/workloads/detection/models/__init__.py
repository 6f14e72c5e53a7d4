"""Object detectors: SSD and Faster R-CNN networks with one common interface."""
