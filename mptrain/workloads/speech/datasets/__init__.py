"""Data sets of utterances with transcripts for speech recognition."""
