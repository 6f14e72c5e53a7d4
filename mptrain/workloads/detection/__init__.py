"""Object detection: data sets of pictures with boxes, SSD and Faster R-CNN networks, the task with COCO's metric."""
