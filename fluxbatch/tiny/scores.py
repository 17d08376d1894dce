"""How a line of the score table is drawn, and the table as TRAINING.md holds it. Knows names and numbers only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

Scores = dict[str, float]  # kind, and `kind: check` for each of its checks, -> share of right answers
DETAILS = ("setting (height x width)", "drawn on", "prompts a kind")


@dataclass(frozen=True)
class Setting:
    """How a line of the score table was drawn. Without a guidance where the model has none."""

    height: int = 128
    width: int = 128
    num_inference_steps: int = 20
    guidance_scale: float | None = 3.5
    dtype: str = "float32"
    num_prompts: int = 256  # of each kind

    @property
    def name(self) -> str:
        name = f"{self.height}x{self.width}, {self.num_inference_steps} steps"
        name += f", guidance {self.guidance_scale:g}" if self.guidance_scale is not None else ""
        return name + (f", {self.dtype}" if self.dtype != "float32" else "")


# in the order of their worth, should time run out
SETTINGS = (
    Setting(),
    Setting(96, 160),
    Setting(160, 96),
    Setting(112, 144),
    Setting(144, 112),
    Setting(256, 256, num_prompts=64),
    Setting(num_inference_steps=8),
    Setting(dtype="bfloat16"),
    Setting(192, 192, num_prompts=64),
    Setting(num_inference_steps=4),
    Setting(dtype="float16"),
    Setting(192, 320, num_prompts=48),
    Setting(320, 192, num_prompts=48),
    Setting(guidance_scale=1.0, num_prompts=128),
    Setting(guidance_scale=5.0, num_prompts=128),
)


def settings_of(*, guided: bool) -> tuple[Setting, ...]:
    """All of a guided model; of another one those that differ in more than their guidance."""
    if guided:
        return SETTINGS
    usual = Setting().guidance_scale
    return tuple(replace(some, guidance_scale=None) for some in SETTINGS if some.guidance_scale == usual)


def headlines(scores: Mapping[str, float]) -> Scores:
    return {kind: share for kind, share in scores.items() if ":" not in kind}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    drawn_on: str
    num_prompts: int
    scores: Mapping[str, float]

    def cells(self, kinds: Sequence[str]) -> list[str]:
        shares = (f"{self.scores.get(kind, float('nan')):.3f}" for kind in kinds)
        return [self.name, self.drawn_on, str(self.num_prompts), *shares]


def table(lines: Iterable[Line]) -> str:
    """The headline of every kind, a line a setting, as Markdown."""
    lines = list(lines)
    kinds = list(headlines(lines[0].scores))
    rows = [[*DETAILS, *kinds], ["---"] * (len(DETAILS) + len(kinds)), *(line.cells(kinds) for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def completed(earlier: str, later: str) -> str:
    """One table's lines and those of a later one: in their places unless these are of fewer prompts, or behind them."""
    (head, rule, *old), (other, _, *new) = earlier.strip().splitlines(), later.strip().splitlines()
    if head != other:
        raise SystemExit(f"the scores have other columns than the table that they are to complete: {other}")
    lines = {_cell(line, 0): line for line in old}
    for line in new:
        known = lines.get(_cell(line, 0))
        if known is None or int(_cell(line, 2)) >= int(_cell(known, 2)):
            lines[_cell(line, 0)] = line
    return "\n".join([head, rule, *lines.values()])


def _cell(line: str, number: int) -> str:
    return line.split("|")[1 + number].strip()
