"""Translation models: LSTM with attention, and Transformer."""
