"""Command-line interface of mptrain: parses arguments, calls the layers below, prints and returns exit codes.

Help, completion and usage errors must appear at once, so their modules must not import torch.
"""
