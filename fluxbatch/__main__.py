"""python -m fluxbatch [VERB] key=value ...: the entry, ready for signals before anything heavy is imported."""

from __future__ import annotations

import sys

from fluxbatch.stop import exit_on_signals


def main() -> None:
    """Console entry: ends the process with the exit code (Hydra drops a returned one)."""
    exit_on_signals()
    from fluxbatch.command import run_command

    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
