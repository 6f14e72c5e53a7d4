"""Entry point of ``python -m mptrain`` and of the console script."""

from mptrain.system.interpreter import forget_current_folder

forget_current_folder()  # before anything else is imported

import signal  # noqa: E402

from mptrain.engine.interrupt import end_at_signals  # noqa: E402

with end_at_signals():  # a signal during these imports ends the process with its line and exit code
    from mptrain.cli.main import main as run_words


def main() -> int:
    """Run the ``mptrain`` command line of this process, and return its exit code."""
    return run_words(at_end=_deaf)


def _deaf() -> None:
    """Ignore signals while the interpreter shuts down, so that they do not replace the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
