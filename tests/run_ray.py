"""The real command on a Ray cluster, with the fake model on its workers: python tests/run_ray.py VERB key=value ...

FAKE is the name of a function in ray_fakes and its keywords, as JSON.
"""

import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fluxbatch.stop import exit_on_signals


def main() -> None:
    exit_on_signals()  # as fluxbatch.__main__ does
    import ray_fakes

    from fluxbatch import command, run

    name, keywords = json.loads(os.environ["FAKE"])
    run.run_job = functools.partial(run.run_job, load=functools.partial(getattr(ray_fakes, name), **keywords))
    sys.exit(command.run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
