"""Workload of speech recognition: data sets, task and models that transcribe utterances letter by letter with CTC."""
