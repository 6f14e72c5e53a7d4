"""Objects that commands print with ``--json``, as pydantic models around the values that the text is made of.

The JSON Schema of each, made from its types and docstrings, is a file in ``schemas/``. A new field keeps the version;
one that is gone, renamed or has another meaning raises it.
"""
