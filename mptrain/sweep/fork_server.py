"""The first module that the fork server imports: makes that process fit to be the parent of jobs.

Never import this anywhere else: importing it changes the process. The server leaves the terminal's process group and
the signals that ask for an orderly end alone, because the sweep passes them on to the jobs itself, and dies with the
sweep whatever kills that.
"""

from __future__ import annotations

import gc
import signal

from mptrain.sweep.processes import ENDING_SIGNALS, detach_from_terminal, die_with_parent

signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # its children begin so, and unblock them when they can obey
detach_from_terminal()
die_with_parent(signal.SIGKILL)
gc.disable()  # what follows are imports, which make many objects and drop none; a job turns it on again
