"""python -m fluxbatch [VERB] key=value ...: the entry, ready for signals before anything heavy is imported."""

from __future__ import annotations

import faulthandler
import sys

from fluxbatch.stop import exit_on_signals


def main() -> None:
    """Console entry: ends the process with the exit code (Hydra drops a returned one)."""
    faulthandler.enable()  # a crash in a driver or in compiled code says where, in the job's log
    exit_on_signals()
    from fluxbatch.command import run_command

    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
