"""Records of training loops that others wrote: plain loops of torch, transformers, Lightning."""
