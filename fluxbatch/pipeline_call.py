"""How diffusers calls a pipeline: the arguments of its call with their defaults, out of diffusers' own source text.

Imports no diffusers, which takes seconds and torch. Knows no folder of a model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fluxbatch.errors import ConfigError

REQUIRED = object()  # in place of an argument's default
NEEDED = ("prompt", "height", "width", "num_inference_steps", "generator", "output_type")
CALLBACKS = ("callback_on_step_end", "callback")  # the new way to be told of each step, and the old one
OTHER_TASKS = re.compile(
    "Img2Img|Inpaint|Edit|Control|Fill|Redux|Kontext|Upscale|Refiner|SuperResolution|Adapter|Pix2Pix|GLIGEN|Video|Audio|"
    "Layered|LDM3D|Prior|Decoder|Onnx"
)


def call_of(name: str, place: str) -> dict[str, Any]:
    """The arguments of the pipeline's call with their defaults, where it is a call from text to images."""
    arguments = call_arguments(name)
    if arguments is None:
        raise ConfigError(f"model.path={place}: {name} is no pipeline of the diffusers that is installed here")
    lacking = [argument for argument in NEEDED if argument not in arguments]
    lacking += [] if any(way in arguments for way in CALLBACKS) else [CALLBACKS[0]]
    asks = [argument for argument, default in arguments.items() if default is REQUIRED and argument != "prompt"]
    if OTHER_TASKS.search(name) or lacking or asks or "num_frames" in arguments:
        why = "by its name it does something else"
        why = f"its call asks for {asks[0]}" if asks else why
        why = f"its call has no {lacking[0]}" if lacking else why
        raise ConfigError(f"model.path={place}: {name} must be a pipeline from text to images: {why}")
    return arguments


@cache
def call_arguments(name: str) -> dict[str, Any] | None:
    """Arguments of `name.__call__` in the installed diffusers; None where it has no such class. Nothing is imported."""
    found = _class(name)
    if found is None:
        return None
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__call__":
            return dict(_defaults(node.args))
    bases = [call_arguments(base.id) for base in found.bases if isinstance(base, ast.Name)]
    return next((base for base in bases if base), {})


def _class(name: str) -> ast.ClassDef | None:
    spec = PathFinder.find_spec("diffusers")
    if spec is None or spec.origin is None:
        return None
    head = f"class {name}("
    for path in sorted((Path(spec.origin).parent / "pipelines").rglob("pipeline*.py")):
        source = path.read_text(encoding="utf-8")
        if head in source:
            return next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    return None


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, Any]]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][1:]
    required = len(names) - len(arguments.defaults)
    yield from zip(names, [REQUIRED] * required + [_literal(default) for default in arguments.defaults], strict=True)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, REQUIRED if default is None else _literal(default)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None  # a name, which stands for nothing that is read here
