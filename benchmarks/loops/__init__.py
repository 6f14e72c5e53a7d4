"""The same training, written by us, by hand and with other frameworks."""
