"""What was typed to a verb, its answer to words, its end to an exit code. Does no work of its own."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys

from fluxbatch import __version__, config_rules, job_script, verbs, word_verbs
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import EXIT_DONE, EXIT_FATAL, EXIT_INTERRUPTED, ConfigError, FluxbatchError, ProcessLost
from fluxbatch.stop import exit_lost
from fluxbatch.telemetry.progress import one_line


def run_command(arguments: list[str]) -> int:
    """Do what the command line says; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("fluxbatch").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not fail a finished job
    return _do_and_explain(arguments)


def _do_and_explain(arguments: list[str]) -> int:
    try:
        if "--version" in arguments:
            print(__version__)
            return 0
        if arguments[:1] == ["bench"]:
            return verbs.bench(arguments[1:])
        if arguments[:1] == ["jobs"]:
            _say(job_script.write_script(arguments[1:]))
            return EXIT_DONE
        if arguments and arguments[0] in word_verbs.VERBS:
            return _do_words(*arguments)
        verb, as_json, overrides = _parse(arguments)
        return with_config(overrides, lambda cfg: _do(verbs.VERBS[verb], cfg, as_json=as_json))
    except ProcessLost as error:
        exit_lost(sentence(error))
    except FluxbatchError as error:
        return _refuse(error, error.exit_code)
    except KeyboardInterrupt:
        return _refuse("interrupted; the same command goes on", EXIT_INTERRUPTED)
    except OSError as error:
        return _refuse(_disk_sentence(error), EXIT_FATAL, error)


def _parse(arguments: list[str]) -> tuple[str, bool, list[str]]:
    """VERB, --json, and what Hydra reads. The verb is `run` when the first argument is a setting or a flag."""
    first = arguments[0] if arguments else "run=?"
    if first.startswith("-") or "=" in first:
        verb, rest = "run", arguments
    elif first in verbs.VERBS:
        verb, rest = first, arguments[1:]
    else:
        raise ConfigError(
            f"the verb must be one of {', '.join([*verbs.VERBS, *word_verbs.VERBS, 'jobs', 'bench'])}, got {first!r}"
        )
    if verb == "verify":
        rest = ["verify.repair=true" if argument == "--repair" else argument for argument in rest]
    return verb, "--json" in rest, [argument for argument in rest if argument != "--json"]


def _do_words(verb: str, *arguments: str) -> int:
    if "--help" in arguments:
        _say(f"python -m fluxbatch {word_verbs.VERBS[verb].usage}")
        return 0
    words = word_verbs.read_words(verb, [argument for argument in arguments if argument != "--json"])
    return _tell(word_verbs.VERBS[verb].do(words), as_json="--json" in arguments)


def _do(verb: verbs.Verb, cfg: JobConfig, *, as_json: bool) -> int:
    config_rules.check(cfg)
    return _tell(verb(cfg), as_json=as_json)


def _tell(told: verbs.Answer, *, as_json: bool) -> int:
    answer, words, code = told
    _say(json.dumps(answer, ensure_ascii=False, allow_nan=False) if as_json else words)
    return code


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has read enough; the work is done and its exit code stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


DISK_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room or have the quota raised",
    errno.EROFS: "make it writable",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN), "see to the disk"),
}


def _disk_sentence(error: OSError) -> str:
    told = f"{error.filename or 'the disk'}: {error.strerror or error}"
    remedy = DISK_REMEDIES.get(error.errno or 0)
    return f"{told}; {remedy} and run the same command again, what is committed is safe" if remedy else told


def sentence(what: Exception | str) -> str:
    """One line, whatever a library's message or a manifest's id brings along."""
    return one_line(" ".join(str(what).split("\n")).strip())


def _refuse(what: Exception | str, code: int, error: BaseException | None = None) -> int:
    print(f"fluxbatch: {sentence(what)}", file=sys.stderr)
    for note in getattr(error or what, "__notes__", ()):
        print(f"  {note}", file=sys.stderr)
    return code
