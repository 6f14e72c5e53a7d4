"""Language models: LSTM and Transformer, and output layers for large vocabularies."""
