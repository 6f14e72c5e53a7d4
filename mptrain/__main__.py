"""Entry point of ``python -m mptrain`` and of the console script."""

from mptrain.system.interpreter import forget_current_folder

forget_current_folder()  # before anything else is imported

import signal  # noqa: E402

_HANDLER = signal.getsignal(signal.SIGINT)
if _HANDLER is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during these imports ends the process without a traceback

from mptrain.cli.main import main as run_words  # noqa: E402

signal.signal(signal.SIGINT, _HANDLER)


def main() -> int:
    """Run the ``mptrain`` command line of this process, and return its exit code."""
    return run_words(at_end=_deaf)


def _deaf() -> None:
    """Ignore signals while the interpreter shuts down, so that they do not replace the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
