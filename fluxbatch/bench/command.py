"""python -m fluxbatch bench WHAT [--option value ...] [key=value ...]: the words of one benchmark, and what is kept.

Tables for people as they come, one JSON line last, the same in a file under fluxbatch/bench/results/. Knows no
question: each module WHAT has `add_options(parser)`, `overrides(options)` where it wants settings of its own, and
`measure(cfg, options)`, which yields its figures, more complete each time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fluxbatch import config_rules
from fluxbatch.bench import QUESTIONS
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import EXIT_DONE, EXIT_FATAL, ConfigError

RESULTS = Path(__file__).parent / "results"


def run_bench(arguments: list[str]) -> int:
    """Answer one question; without WHAT, list them. Returns the exit code: 1 where a figure says `ok: false`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(["python -m fluxbatch bench WHAT [--help] [--option value ...] [key=value ...]", *_listed()]))
        return EXIT_DONE
    what, rest = arguments[0], arguments[1:]
    if what not in QUESTIONS:
        raise ConfigError(f"bench must be followed by one of {', '.join(QUESTIONS)}, got {what!r}")
    module = importlib.import_module(f"fluxbatch.bench.{what}")
    options, overrides = _parser(what, module).parse_known_args(rest)
    own = module.overrides(options) if hasattr(module, "overrides") else []
    return with_config([*own, *overrides], lambda cfg: _answer(what, module, cfg, options))


def _listed() -> Iterator[str]:
    yield from (f"  {what:11} {question}" for what, question in QUESTIONS.items())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('python -m fluxbatch ')}: {message}")


def _parser(what: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m fluxbatch bench {what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_options(parser)
    parser.add_argument("--limit-s", type=float, help="end with what was measured after so many seconds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--no-results", action="store_true", help="keep no result file")
    parser.add_argument("--commit", help="what was measured, where this is no git checkout")
    parser.add_argument(
        "--json", action="store_true", help="tables on standard error; only the JSON line on standard output"
    )
    return parser


def _answer(what: str, module: ModuleType, cfg: JobConfig, options: argparse.Namespace) -> int:
    from fluxbatch.bench.results import Result

    config_rules.check(cfg)
    if cfg.model.family == "diffusers":
        raise ConfigError(f"model must be tiny or of a FLUX family for bench, got {cfg.model.name}")
    result = Result(what, cfg, options)
    figures: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        for figures in module.measure(cfg, options):
            result.keep(figures)
        if result.path is not None:
            print(f"kept: {result.path}")
    print(json.dumps(result.described(figures), default=str), flush=True)
    return EXIT_DONE if figures.get("ok", True) else EXIT_FATAL
