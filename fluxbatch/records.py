"""The frozen dataclasses that flow from the manifest to the ledger. Knows nothing of files, tensors or settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Everything that must be equal inside one launch. Sizes in pixels.

    `negative_pass` says whether each row runs a second (negative) prompt through the transformer. `guidance_scale` is
    given where the model takes one number a launch; elsewhere each row has its own.
    """

    height: int
    width: int
    num_inference_steps: int
    negative_pass: bool = False
    guidance_scale: float | None = None

    @property
    def name(self) -> str:
        """`1024x768-28` (height x width - steps), with `-cfg` for a second pass and `-g4.5` for a shared guidance."""
        shape = f"{self.height}x{self.width}-{self.num_inference_steps}" + ("-cfg" if self.negative_pass else "")
        return shape if self.guidance_scale is None else f"{shape}-g{self.guidance_scale!r}"

    @property
    def work(self) -> int:
        """Of one row, in pixels times passes through the transformer: times of different buckets compare by it."""
        return self.height * self.width * self.num_inference_steps * (2 if self.negative_pass else 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted manifest row: all that is needed to draw it, every default filled in."""

    id: str
    prompt: str
    negative_prompt: str | None
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    seed: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """One manifest row refused at planning. `row` counts from 0 across all manifest files."""

    row: int
    id: str | None
    column: str
    reason: str  # a short code: null_prompt, bad_size, duplicate_id, ...
    message: str


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`num_rows` rows from `first_row` of a plan part, launched as `size`: the rest is padding."""

    index: int  # unique in the whole job
    shard: int
    bucket: Bucket
    first_row: int
    num_rows: int
    size: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard: consecutive rows of one plan part, cut into batches that never cross its edge.

    A redo takes rows away from it: `dropped` holds their places in the shard, `revision` the number of the plan part
    that took the last of them, and `batches` only those with rows that are kept. Its files have that number too.
    """

    index: int
    first_row: int
    num_rows: int
    batches: Sequence[BatchPlan]
    revision: int = 0
    dropped: frozenset[int] | range = frozenset()

    @property
    def num_kept(self) -> int:
        return self.num_rows - len(self.dropped)


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned batch with its rows: `requests[i]` sits in slot i, the slots behind them are padding."""

    plan: BatchPlan
    requests: tuple[Request, ...]

    @property
    def bucket(self) -> Bucket:
        return self.plan.bucket

    @property
    def num_padded(self) -> int:
        return self.plan.size - len(self.requests)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why one row has no image. `stage` is encode, denoise, decode, transfer or compress."""

    stage: str
    reason: str  # a short code: non_finite, out_of_memory, codec_error, ...
    message: str
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row after the pipeline: the bytes of its image file, or its failure."""

    id: str
    image: bytes | None
    truncated: bool = False
    failure: RowFailure | None = None

    def __post_init__(self) -> None:
        assert (self.image is None) != (self.failure is None), f"row {self.id} must have an image or a failure"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one batch cost. Stages overlap in the double buffer: their sum is not the wall time.

    Milliseconds from CUDA events on a GPU, from a monotonic clock on a CPU. `wait_ms` maps a hand-over
    (`prefetch->launch`, `launch->transfer`, `transfer->compress`, `compress->commit`) to the time its
    receiver stood idle for this batch.
    """

    prefetch_ms: float = 0.0
    encode_ms: float = 0.0
    denoise_ms: float = 0.0
    decode_ms: float = 0.0
    transfer_ms: float = 0.0
    compress_ms: float = 0.0
    wait_ms: dict[str, float] = field(default_factory=dict)
    first_of_shape: bool = False
    out_of_memory_splits: int = 0
    peak_allocated_gib: float | None = None  # of this process on its GPU, while the batch was launched
    peak_reserved_gib: float | None = None


@dataclass(frozen=True, slots=True)
class CompressedBatch:
    """A batch on its way to the disk: one result for each request, in slot order."""

    batch: Batch
    results: tuple[RowResult, ...]
    times: StageTimes = StageTimes()

    def __post_init__(self) -> None:
        asked, got = [r.id for r in self.batch.requests], [r.id for r in self.results]
        if asked != got:  # more or fewer images than rows, or in another order: nothing may be written
            raise ValueError(f"batch {self.batch.plan.index}: results for {got} do not answer requests {asked}")

    @property
    def num_ok(self) -> int:
        return sum(r.image is not None for r in self.results)

    @property
    def num_failed(self) -> int:
        return len(self.results) - self.num_ok


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """One launch of `size` images: seconds of one step of the denoise and of the decode; memory at its peak."""

    size: int
    step_s: float
    decode_s: float
    peak_gib: float

    def images_per_s(self, *, num_inference_steps: int) -> float:
        return self.size / (num_inference_steps * self.step_s + self.decode_s)


@dataclass(frozen=True, slots=True)
class ShardCommit:
    """One ledger line: one committed file. `rows` images or `failed` failures stand in it.

    `file` is relative to the run folder. `mtime_ns` lets a resume trust an untouched file without reading it.
    """

    shard: int
    file: str
    rows: int
    failed: int
    bytes: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class RowRules:
    """What a row must keep to for this model and image format; made from the settings by `config.row_rules`."""

    height: int  # defaults for absent values
    width: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    size_multiple: int  # both sides, in pixels
    max_pixels: int
    max_side: int  # what the image format can hold
    size_policy: str  # reject or floor
    allow_blank_prompts: bool
    guidance: str  # embedded, classifier_free, none (a row's is ignored) or refused
    negative_prompts: bool  # whether this model can run a second pass
    shared_guidance: bool = False  # whether rows of one launch must have the same guidance


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The accounting identity: rows = written + failed + rejected + pending."""

    rows: int
    written: int
    failed: int
    rejected: int
    pending: int

    @property
    def balanced(self) -> bool:
        return self.rows == self.written + self.failed + self.rejected + self.pending
