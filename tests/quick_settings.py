"""Settings read in C, and not once more only to see whether they ask for a multirun: half a second less a job."""

import yaml
from hydra._internal.hydra import Hydra


def read_quickly() -> None:
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc, assignment]
    Hydra.get_mode = lambda self, config_name, overrides: None  # type: ignore[method-assign]
