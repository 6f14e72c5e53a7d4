"""Reports of runs, sweeps and comparisons: one self-contained HTML page and the same content in Markdown.

A page consists of sections of blocks: paragraphs, tables, figures; a terminal shows them too. ``name`` of a figure is
its file name and the prefix of its ids: letters, digits and hyphens. Reports are made from records alone. This package
must not import torch.
"""
