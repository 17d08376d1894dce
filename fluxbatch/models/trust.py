"""What in a model's folder could run code: refused by name. Weights are safetensors, classes our own choice.

A pickle beside the safetensors is never opened; a folder that has only pickles lacks its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxbatch.errors import ConfigError

LIBRARIES = ("diffusers", "transformers")
REFUSAL = "code that comes with a model is never run"


def refuse_code(folder: Path, *, index: Mapping[str, Any]) -> None:
    """ConfigError where `model_index.json` or a part's own settings name classes outside diffusers and transformers."""
    for part, home in index.items():
        if isinstance(home, list) and home and home[0] not in (None, *LIBRARIES):
            raise ConfigError(f"model.path={folder}: model_index.json: {part} comes from {home[0]!r}; {REFUSAL}")
    for path in sorted(folder.glob("*/*config.json")):
        if "auto_map" in json.loads(path.read_bytes()):
            raise ConfigError(f"model.path={folder}: {path.relative_to(folder)} has an auto_map; {REFUSAL}")
