"""``python -m mptrain``, and the console script."""

from mptrain.interpreter import forget_current_folder

forget_current_folder()  # before anything else is imported

import signal  # noqa: E402

from mptrain.cli.main import main as run_words  # noqa: E402


def main() -> int:
    """Runs the words after the program's name; returns the exit code."""
    return run_words(at_end=_deaf)


def _deaf() -> None:
    """Nothing is left to be ended: a signal while the interpreter goes would only replace the exit code by its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
