"""Image classifiers: functions that build a network for the classes, channels and size of a data set's images."""
