"""Arithmetic of number formats and gradients: overflow check, norms, exponent histograms, forecast of loss scales.

Functions of numbers, tensors and records; the rules that change the loss scale are in `mptrain.scaler`.
"""
