"""Arithmetic of number formats and gradients; the rules that change the loss scale are in `mptrain.scaler`."""
