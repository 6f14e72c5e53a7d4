"""The tests, and what they share. All of it is imported as ``tests.NAME``, also by programs that tests start."""
