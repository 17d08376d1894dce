"""The real command with the fake model, and a place to die: python tests/run_fake.py VERB key=value ...

KILL_AT=step:N sends this process SIGKILL at the Nth announcement of that commit step (`fluxbatch.commit` audit events);
KILL_AT=any:N at the Nth step of whatever name. At the step that DO_AT names in the same way, the shell command DO is
run. FAKE_SLOW_S makes each batch take that long; STEPS_TO=file writes down each step that was announced. REAL_MODEL=1
leaves the model that the settings name.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # this tree, not an installed one


def at(wanted: str, act: Callable[[], object]) -> None:
    """Act at the Nth announcement of a step."""
    step, _, number = wanted.partition(":")
    seen: Counter[str] = Counter()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "fluxbatch.commit" and step in (arguments[0], "any"):
            seen[step] += 1
            if seen[step] == int(number):
                act()

    sys.addaudithook(hook)


def write_steps(path: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "fluxbatch.commit":
            with open(path, "a") as file:
                file.write(f"{arguments[0]} {arguments[1]}\n")

    sys.addaudithook(hook)


def import_everything() -> None:
    """What a run imports, and what it makes once a process."""
    import fake_model  # noqa: F401
    from PIL import Image
    from quick_settings import read_quickly

    from fluxbatch import run, verbs  # noqa: F401
    from fluxbatch.output import verify  # noqa: F401
    from fluxbatch.pipeline import loop  # noqa: F401
    from fluxbatch.reports import charts, page

    read_quickly()
    Image.init()
    page.template()
    charts.line_chart([0.0, 1.0], [1.0, 2.0], label="", x_label="")


def run(arguments: list[str]) -> int:
    from fake_model import FakeModel

    from fluxbatch import command, run

    class SlowModel(FakeModel):
        def decode(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(2 * float(os.environ.get("FAKE_SLOW_S", "0")))
            return super().decode(*args, **kwargs)

    if not os.environ.get("REAL_MODEL"):
        run._load_model = lambda cfg, rank: SlowModel()
        run._check_model = lambda cfg: None
    if os.environ.get("KILL_AT"):
        at(os.environ["KILL_AT"], lambda: os.kill(os.getpid(), signal.SIGKILL))
    if os.environ.get("DO_AT"):
        at(os.environ["DO_AT"], lambda: subprocess.run(os.environ["DO"], shell=True))
    if os.environ.get("STEPS_TO"):
        write_steps(os.environ["STEPS_TO"])
    try:
        return command.run_command(arguments)
    except Exception:  # as the interpreter would end it
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
