"""mptrain from Python: train, read and use runs. Nothing here exits, or leaves a caller's settings changed."""
