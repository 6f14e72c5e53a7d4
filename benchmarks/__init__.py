"""Measures mptrain beside what a careful engineer, or another framework, does with the same work.

``python -m benchmarks.run --suite cpu`` measures, ``python -m benchmarks.report FILE.json`` shows. README.md in this
folder says what is measured how, and what came of each change.
"""
