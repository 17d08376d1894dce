"""The networks that can be trained, by the names of their families."""

from typing import Any

from fluxbatch.tiny.flux1 import Flux1
from fluxbatch.tiny.flux2 import Flux2

FAMILIES: dict[str, Any] = {family.name: family for family in (Flux1, Flux2)}
