"""The folder of a training run or an examination: log.txt, and run.json, written anew whenever something is known."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxbatch.tiny.scores import Line, Scores, headlines, table


@dataclass
class Record:
    """What is known so far."""

    out: Path
    facts: dict[str, Any]
    scores: dict[str, Scores] = field(default_factory=dict)
    num_prompts: dict[str, int] = field(default_factory=dict)  # of each kind, by the names of the scores
    start: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.start:6.1f} s] {text}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a") as log:
            print(line, file=log)

    def known(self) -> dict[str, Any]:
        return self.facts | {"scores": self.scores, "num_prompts": self.num_prompts}

    def write(self) -> None:
        aside = self.out / ".run.json"
        aside.write_text(json.dumps(self.known(), indent=1))
        aside.replace(self.out / "run.json")

    def found(self, name: str, scores: Scores, num_prompts: int) -> None:
        self.scores[name], self.num_prompts[name] = scores, num_prompts
        self.write()
        self.say(f"{name}: " + ", ".join(f"{kind} {share:.3f}" for kind, share in headlines(scores).items()))

    def table(self) -> str:
        return score_table(self.known())


def score_table(run: dict[str, Any]) -> str:
    """Of what run.json holds."""
    return table(Line(name, run["device"], run["num_prompts"][name], some) for name, some in run["scores"].items())
