"""From the words of a command line to a JobConfig, through Hydra; its refusals as one sentence. Knows no verb."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError, first_line

# Settings that are paths or names: their values are taken letter by letter, whatever Hydra's grammar thinks of them.
LITERAL_KEYS = (
    "manifest.path",
    "output.dir",
    "model.path",
    "model.base",
    "model.compile_cache",
    "run.name",
    "run.deadline",
    "run.devices",
    "run.ray_resources",
    "run.reuse_from",
    "telemetry.prometheus_textfile",
)
FLAGS_WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg",
                    "-c", "--info", "-i", "--experimental-rerun")  # fmt: skip
FLAGS = (*FLAGS_WITH_VALUE, "--help", "--hydra-help", "--version", "--resolve", "--run", "--multirun",
         "--shell-completion")  # fmt: skip
MULTIRUN = {"-m", "--multirun"}
KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


def with_config(overrides: list[str], do: Callable[[JobConfig], int]) -> int:
    """Compose the settings and hand them to `do`; its exit code, or the largest one of a multirun.

    Hydra's own flags (`--cfg job`, `--help`, `-m`, ...) do what they always do. Raises ConfigError, one sentence, for
    everything that Hydra or OmegaConf refuses.
    """
    codes: list[int] = []
    errors: list[BaseException] = []

    def task(composed: DictConfig) -> None:
        try:
            codes.append(do(_to_config(composed)))
        except BaseException as error:  # kept from Hydra, which would print words of its own over it
            errors.append(error)

    _refuse_stray_words(overrides)
    with tempfile.TemporaryDirectory(prefix="fluxbatch-") as sweep_folder:
        if MULTIRUN & set(overrides):
            # Hydra leaves a multirun.yaml in it, else where the command was given.
            others = [override for override in overrides if override not in MULTIRUN]
            sys.argv = ["fluxbatch", "-m", *others, f"hydra.sweep.dir={sweep_folder}"]
        else:
            sys.argv = ["fluxbatch", *map(_literal, overrides)]
        _compose(task, overrides)
    if errors:
        raise errors[0]
    return max(codes, default=0)


def _compose(task: Callable[[DictConfig], None], overrides: list[str]) -> None:
    """Let Hydra call `task`; what it and OmegaConf refuse becomes one sentence."""
    ConfigStore.instance().store(name="schema", node=JobConfig)
    # With it Hydra lets its errors through to us, instead of printing them and ending the process with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error, overrides)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.name} line {mark.line + 1}" if mark else "a settings file"
        raise ConfigError(f"{place} is not YAML: {error.problem}") from error
    except BrokenPipeError:  # `--help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # what Hydra makes of a group that is null, a number or a list
        raise ConfigError(f"{' '.join(overrides)} cannot be composed: {first_line(error)}") from error


def conf_folder() -> Path:
    """conf/ beside the package in a checkout, inside it in an installed wheel."""
    here = Path(__file__).resolve().parent
    inside = here / "conf"
    return inside if inside.is_dir() else here.parent / "conf"


def _literal(argument: str) -> str:
    """Quote the values of literal keys: spaces, commas, =, # and any letter need no escaping there.

    Left to Hydra: a list, a quoted value, an interpolation at the front, null, nothing.
    """
    key, _, value = argument.partition("=")
    if key not in LITERAL_KEYS or value in ("", "null") or value.startswith(("[", "'", '"', "${")):
        return argument
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", value.replace("${", r"\${"))
    closing = len(escaped) - len(escaped.rstrip("\\"))  # backslashes at the end would escape the closing quote
    return f"{key}='{escaped}{chr(92) * closing}'"


def _refuse_stray_words(arguments: list[str]) -> None:
    """What is neither key=value nor a flag (or its value), before Hydra calls it a quoting problem."""
    previous = ""
    for argument in arguments:
        if previous in ("--config-dir", "-cd") and not Path(argument).is_dir():
            raise ConfigError(f"{previous} must name a folder, got {argument}")
        is_flag_or_setting = argument.startswith(("-", "~")) or "=" in argument or previous in FLAGS_WITH_VALUE
        if argument.startswith("--") and argument.partition("=")[0] not in FLAGS:
            close = difflib.get_close_matches(argument, [*FLAGS, "--json"], n=1)
            raise ConfigError(
                f"{argument} is not a flag" + (f"; did you mean {close[0]}?" if close else "; see --help")
            )
        if not is_flag_or_setting:
            raise ConfigError(f"{argument!r} is not key=value; {_meant_by(argument)}")
        previous = argument


def _meant_by(word: str) -> str:
    path = Path(word)
    if (path / "job.json").is_file():
        return f"did you mean output.dir={word}?"
    if path.suffix == ".parquet":
        return f"did you mean manifest.path={word}?"
    return "was a value with a space left without quotes?"


def _to_config(composed: DictConfig) -> JobConfig:
    _refuse_added_keys(composed)
    try:
        cfg = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:  # `model=[]` composes, and leaves nothing in the group
        raise ConfigError(f"{error.full_key} must be set, got nothing; was its group given an empty list?") from error
    assert isinstance(cfg, JobConfig)
    return cfg


def _refuse_added_keys(composed: DictConfig) -> None:
    """`+key=value` adds what no dataclass knows; OmegaConf lets it through."""
    known = set(_keys(JobConfig))
    for group, node in composed.items():
        names = [f"{group!s}.{name!s}" for name in node] if isinstance(node, DictConfig) else [str(group)]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(_no_such_key(unknown[0]))


def _keys(group: type, prefix: str = "") -> Iterator[str]:
    for entry in dataclasses.fields(group):
        default = entry.default_factory
        if isinstance(default, type) and dataclasses.is_dataclass(default):
            yield from _keys(default, f"{prefix}{entry.name}.")
        yield f"{prefix}{entry.name}"


def _no_such_key(key: str) -> str:
    alike = _alike(key)
    hint = f"; did you mean {' or '.join(alike)}?" if alike else "; --cfg job prints all settings"
    return f"{key} is not a setting{hint}"


def _alike(key: str) -> list[str]:
    """The settings that a person may have meant: of that name in another group, with that word in it, or alike."""
    group, _, name = key.rpartition(".")
    known = [other for other in _keys(JobConfig) if other.count(".") <= max(1, key.count("."))]
    named = [other for other in known if "." in other and other.rpartition(".")[2] == name]
    near = named or difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    words = [other for other in known if "." in other and name.rstrip("s") in _singular(other.rpartition(".")[2])]
    if named and not group:
        return list(dict.fromkeys(named + words))[:3]
    if near or not words:
        return near or difflib.get_close_matches(key, [other for other in _keys(JobConfig) if "." in other], n=1)
    return [other for other in words if other.rpartition(".")[0] == group][:3] or words[:3]


def _singular(name: str) -> list[str]:
    return [word.rstrip("s") for word in name.split("_")]


def _sentence(error: Exception, overrides: list[str]) -> str:
    """The key, the rule and the value, out of Hydra's and OmegaConf's several lines."""
    cause = error.__cause__ or error
    first = first_line(getattr(cause, "msg", None) or str(cause))
    key = getattr(cause, "full_key", None) or _key_in(str(error))
    if isinstance(error, MissingConfigException):
        return _no_such_choice(str(error))
    if key == "job":
        return f"{first.partition(':')[0].removeprefix('In ')} must begin with the line `# @package _global_`"
    if key and re.search(r"Key '.*' (is )?not in|Could not override|ConfigKeyError", first):
        return _no_such_key(key)
    wrong_type = re.match(r"Value (.*) of type '.*' could not be converted to (\w+)", first)
    if key and wrong_type:
        return f"{key} must be {KINDS.get(wrong_type[2], wrong_type[2])}, got {wrong_type[1]}"
    if key and "not Optional" in first:
        return f"{key} must be given, got null"
    ambiguous = re.match("Ambiguous value for argument '(.*)'", first)
    if ambiguous:
        name, _, value = ambiguous[1].partition("=")
        return (
            f"{name} must be one value, got {value}; -m runs them one after another, '{name}=\"{value}\"' is one text"
        )
    culprit = _unparsable(overrides)
    if culprit and not key:
        name, _, value = culprit.partition("=")
        return f"{name} must be quoted for Hydra, got {value}; write '{name}=\"{value}\"' (README, Paths and quoting)"
    return f"{key}: {first}" if key else first


def _key_in(text: str) -> str | None:
    found = re.search(r"full_key: (\S+)", text)
    return found[1] if found else None


def _no_such_choice(text: str) -> str:
    missing = re.search(r"Could not find '(\w+)/(.*)'", text)
    options = re.findall(r"^\t(?!provider)(\S+)$", text, flags=re.MULTILINE)
    if not missing:
        return first_line(text)
    told = f"{missing[1]} must be one of {', '.join(options)}, got {missing[2]!r}"
    if missing[1] == "job":
        told += f"; one of your own is FOLDER/job/{missing[2]}.yaml, named by --config-dir FOLDER"
    return told


def _unparsable(overrides: list[str]) -> str | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for override in map(_literal, overrides):
        try:
            parser.parse_override(override)
        except HydraException:
            return override
    return None
