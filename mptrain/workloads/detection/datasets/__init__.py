"""Object detection data sets: COCO, Pascal VOC, data in their formats, and synthetic scenes of digits."""
