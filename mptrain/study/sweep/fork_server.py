"""Setup of the fork server: the process from which `multiprocessing` forks the CPU jobs of a sweep.

The server imports this module before any other. Do not import it anywhere else, because importing it changes the
process. The server leaves the terminal's process group and blocks the signals for a graceful stop, because the sweep
itself forwards them to the jobs. The server is killed when the sweep's process ends for any reason.
"""

from __future__ import annotations

import gc
import signal

from mptrain.study.sweep.processes import ENDING_SIGNALS, detach_from_terminal, die_with_parent

signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # jobs inherit this and unblock them later
detach_from_terminal()
die_with_parent(signal.SIGKILL)
gc.disable()  # speeds up the imports that follow, which create many objects and free none; a job enables it again
