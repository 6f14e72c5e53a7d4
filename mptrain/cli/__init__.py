"""Parses words, calls the layers below, prints, answers with an exit code. No torch at module level."""
