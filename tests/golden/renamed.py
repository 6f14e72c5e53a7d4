"""Words of records that have another name now: the one place where `python -m tests.golden compare` learns of a rename.

``RENAMED = {"abnormal": "unexpected", "scaler.clean": "scaler.growth_tracker"}`` lets an older folder, in which the phase
of an event is ``abnormal`` and a state is ``.learners.main.scaler.clean``, equal a newer one.

A word stands for itself in keys and in values wherever it is not part of a longer word. It may have dots and blanks in it.
The older folder is the first one of the command line, and the only one that is translated.
"""

from __future__ import annotations

#: Old word to new word.
RENAMED: dict[str, str] = {}
