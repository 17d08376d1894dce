"""What can end a command, each with its exit code. Every message is one sentence: the place, the rule, the value."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FATAL = 1
EXIT_CONFIG = 2
EXIT_MANIFEST = 3
EXIT_ROW_ERRORS = 4
EXIT_DISCREPANCY = 5
EXIT_BUSY = 6
EXIT_INTERRUPTED = 75
EXIT_LOST = 71  # of a supervised process only, for its supervisor: ProcessLost, where others end with 1

SAID_AT_MOST = 300  # letters of another library's message: some print all settings


def first_line(said: BaseException | str) -> str:
    """What another library says, as a part of one of our sentences; the name of an error that says nothing."""
    line = next((line.strip() for line in str(said).splitlines() if line.strip()), "")
    if not line and isinstance(said, BaseException):
        return type(said).__name__
    return line if len(line) <= SAID_AT_MOST else f"{line[: SAID_AT_MOST - 3]}..."


def end_code(row_errors: int, *, fail_on_row_errors: bool) -> int:
    """What a job that is done ends with, so many of its rows being rejected or failed."""
    return EXIT_ROW_ERRORS if row_errors and fail_on_row_errors else EXIT_DONE


class FluxbatchError(Exception):
    """A fatal error that a person can act on; `exit_code` is what the process ends with."""

    exit_code = EXIT_FATAL


class ConfigError(FluxbatchError):
    """A setting is wrong: `plan.batch_size must be >= 1, got 0`."""

    exit_code = EXIT_CONFIG


class ManifestError(FluxbatchError):
    """The manifest cannot be used as a whole (one bad row is a `Rejection` instead)."""

    exit_code = EXIT_MANIFEST


class FolderBusyError(FluxbatchError):
    """Another live run owns the output folder."""

    exit_code = EXIT_BUSY


class ProcessLost(FluxbatchError):
    """A thread hangs, or the GPU takes no more work: only the end of the process helps, with nothing cleaned up."""


class TooManyFailures(FluxbatchError):
    """More rows fail than a job may lose: something is wrong with all of them."""


class Interrupted(FluxbatchError):
    """A signal or the deadline stopped the run; the same command goes on."""

    exit_code = EXIT_INTERRUPTED


def symlink_refused(path: object) -> ConfigError:
    """A link under a name of ours would be written through, or stand for ever in the way of what has that name."""
    return ConfigError(f"output.dir must hold files of its own, but {path} is a symlink, which is not followed")
