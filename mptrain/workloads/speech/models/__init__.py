"""Networks that recognise speech."""
