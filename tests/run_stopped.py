"""The real entry with the fake model and one place where something happens: python run_stopped.py VERB key=value ...

AT=PLACE:N names the Nth time that a place is reached: import, plan, load, a stage of the fake model (tokenize, noise,
encode, velocity, decode), compress, compaction or report. DO says what happens there: `pause` writes a byte to
descriptor HERE and goes on when one comes from descriptor GO; `hang` never goes on; anything else is the message of
a RuntimeError.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fluxbatch.stop import exit_on_signals

PLACE, _, NUMBER = os.environ.get("AT", ":0").partition(":")
counting = threading.Lock()
reached = 0


def reach(place: str) -> None:
    global reached
    if place != PLACE:
        return
    with counting:
        reached += 1
        is_there = reached == int(NUMBER)
    if is_there:
        act(os.environ["DO"])


def act(what: str) -> None:
    if what == "pause":
        os.write(int(os.environ["HERE"]), b".")
        os.read(int(os.environ["GO"]), 1)
    elif what == "hang":
        threading.Event().wait()
    else:
        raise RuntimeError(what)


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "import" and arguments[0] == "hydra":
        reach("import")
    if event == "fluxbatch.commit" and arguments[0] == "temporary" and "/data/" in arguments[1]:
        reach("compaction")


def before(place: str, function: Any) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        reach(place)
        return function(*arguments, **options)

    return wrapped


def main() -> None:
    exit_on_signals()  # as fluxbatch.__main__ does
    sys.addaudithook(audit)
    from fake_model import FakeModel

    from fluxbatch import command, planning, run
    from fluxbatch.pipeline import compress
    from fluxbatch.reports import report

    run._check_model = lambda cfg: None
    run._load_model = before("load", lambda cfg, rank: FakeModel(hook=lambda stage, call: reach(stage)))
    planning.prepare = before("plan", planning.prepare)
    report.write_report = before("report", report.write_report)
    compress.compress = before("compress", compress.compress)
    sys.exit(command.run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
