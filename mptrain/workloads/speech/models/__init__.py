"""Networks that recognise speech: Deep Speech 2."""
