"""The real command with the fake model, and a place to die: python tests/run_fake.py VERB key=value ...

KILL_AT=step:N sends this process SIGKILL at the Nth announcement of that commit step (`fluxbatch.commit` audit events);
KILL_AT=batch:N when the Nth batch is handed to its commit. FAKE_SLOW_S makes each batch take that long.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def die_at(wanted: str) -> None:
    step, _, number = wanted.partition(":")
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "fluxbatch.commit" and arguments[0] == step:
            seen += 1
            if seen == int(number):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    from fake_model import FakeModel

    from fluxbatch import command, run

    class SlowModel(FakeModel):
        def velocity(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            time.sleep(float(os.environ.get("FAKE_SLOW_S", "0")))
            return super().velocity(*args, **kwargs)

    run._load_model = lambda cfg, rank: SlowModel()
    run._check_model = lambda cfg: None
    if os.environ.get("KILL_AT"):
        die_at(os.environ["KILL_AT"])
    sys.exit(command.run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
