"""``python -m mptrain``, and the console script."""

from __future__ import annotations

from mptrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
