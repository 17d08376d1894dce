"""Trains one network: flow matching, then guidance distillation, until the clock says so. Knows the steps and weights
of one device, no captions and no files."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import Tensor

from fluxbatch.tiny.data import LATE, Share
from fluxbatch.tiny.flow import Bucket, TokenIds, distillation_loss, flow_loss
from fluxbatch.tiny.optim import Optimizer, Recorder, copy_of

FLOW_AVERAGE, DISTILL_AVERAGE = 0.999, 0.99  # of about 1,000 and 100 steps; the rate has fallen to nothing by then
DISTILL_RATE = 0.4  # of the flow's learning rate
DISTILL_STEPS = 0.65  # of the steps of the second stage; the others go on with flow matching
WARM_UP_STEPS = 200  # the moments start empty in each run
CONSTANT = 0.4  # of a stage before the rate falls
LOG_S, KEEP_S = 5.0, 60.0


@dataclass
class Clock:
    """This run's wall time; SIGTERM ends it at once."""

    minutes: float
    start: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def spent_s(self) -> float:
        return time.monotonic() - self.start

    def left_s(self) -> float:
        return 0.0 if self.stopped else 60 * self.minutes - self.spent_s()

    def stop(self, *_: object) -> None:
        self.stopped = True


@dataclass
class Progress:
    """What all runs together have trained, and this run's losses."""

    steps: int = 0
    samples: int = 0
    trained_s: float = 0.0
    losses: list[dict[str, float | str]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One size's captured training step and how often it is taken."""

    take: Callable[[], None]
    early: float
    late: float
    samples: int


class Trainer:
    """Owns the network, its average and the optimiser."""

    def __init__(
        self, net: Any, *, progress: Progress, clock: Clock, say: Callable[[str], None], keep: Callable[[Any], None]
    ) -> None:
        self.net, self.progress, self.clock, self.say, self.keep = net, progress, clock, say, keep
        self.device = next(net.parameters()).device
        self.parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self.average = copy_of(self.parameters)
        self.optimizer = Optimizer(net, self.average)
        self.recorder = Recorder(say)
        self.loss_sum = torch.zeros((), device=self.device)
        self.flow_steps: list[Step] = []
        self.steps_a_look = 25 if self.device.type == "cuda" else 1  # at the clock; each look waits for the device

    def averaged(self) -> dict[str, Tensor]:
        """The average under the network's names. T5's embedding has two names for one tensor."""
        average_of = {p.data_ptr(): a for p, a in zip(self.parameters, self.average, strict=True)}
        return {name: average_of.get(value.data_ptr(), value) for name, value in self.net.state_dict().items()}

    def record_flow(self, buckets: list[Bucket], shares: tuple[Share, ...], *, empty: TokenIds) -> None:
        """Compiles and captures the steps of flow matching."""
        if self.device.type == "cuda":
            self.net.compile_parts()
        for bucket, share in zip(buckets, shares, strict=True):
            loss = functools.partial(flow_loss, self.net, bucket, empty=empty)
            self.flow_steps.append(self._recorded(loss, bucket, early=share.early, late=share.late))

    def match_flow(self, *, rate: float, until_left_s: float) -> None:
        self._train("flow", self.flow_steps, rate=rate, average=FLOW_AVERAGE, until_left_s=until_left_s)

    def distil(
        self,
        buckets: list[Bucket],
        shares: tuple[Share, ...],
        *,
        empty: TokenIds,
        teacher: Any,
        rate: float,
        until_left_s: float,
    ) -> None:
        """From the average on, towards two passes of that average; between, flow matching goes on."""
        self.use_average()
        with torch.no_grad():
            empty_text = teacher.embed(empty)
        self.recorder = Recorder(self.say)  # memory of its own: these steps and those recorded before are mixed
        steps = []
        for bucket, share, flow_step in zip(buckets, shares, self.flow_steps, strict=True):
            loss = functools.partial(
                distillation_loss, self.net, bucket, empty=empty, teacher=teacher, empty_text=empty_text
            )
            often, seldom = DISTILL_STEPS * share.late, (1 - DISTILL_STEPS) * share.late
            steps.append(self._recorded(loss, bucket, early=often, late=often))
            steps.append(Step(flow_step.take, seldom, seldom, flow_step.samples))
        rate *= DISTILL_RATE
        self._train("distillation", steps, rate=rate, average=DISTILL_AVERAGE, until_left_s=until_left_s)

    @torch.no_grad()
    def use_average(self) -> None:
        """Puts the average in the network's place, where captured steps find it."""
        torch._foreach_copy_(self.parameters, self.average)

    def _recorded(self, loss: Callable[[], Tensor], bucket: Bucket, *, early: float, late: float) -> Step:
        self.optimizer.learning_rate.zero_()  # recording takes the step a few times
        self.optimizer.average_decay.fill_(1.0)
        take = self.recorder.record(functools.partial(self._step, loss))
        self.say(f"{bucket.height}x{bucket.width} ready")
        return Step(take, early, late, bucket.batch_size)

    def _step(self, loss: Callable[[], Tensor]) -> None:
        with mixed_precision(self.device):
            value = loss()
        self.optimizer.step(value)
        self.loss_sum.add_(value.detach())

    def _train(self, stage: str, steps: list[Step], *, rate: float, average: float, until_left_s: float) -> None:
        """Until no more than `until_left_s` of this run are left; one look at the clock at least."""
        began, trained_s = time.monotonic(), self.progress.trained_s
        whole_s = max(1.0, self.clock.left_s() - until_left_s)
        order = np.random.default_rng(self.progress.steps)
        self.loss_sum.zero_()
        done, logged, kept, window = 0, began, began, [0, 0]
        while done == 0 or self.clock.left_s() > until_left_s:
            share = (time.monotonic() - began) / whole_s
            self.optimizer.learning_rate.fill_(rate * falling(share) * min(1.0, (done + 1) / WARM_UP_STEPS))
            self.optimizer.average_decay.fill_(min(average, 1 - 1 / (done + 2)))
            odds = np.array([step.early if share < LATE else step.late for step in steps])
            for choice in order.choice(len(steps), size=self.steps_a_look, p=odds / odds.sum()):
                steps[choice].take()
                window[1] += steps[choice].samples
            done, window[0] = done + self.steps_a_look, window[0] + self.steps_a_look
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            self.progress.trained_s = trained_s + now - began
            if now - logged >= LOG_S or self.clock.left_s() <= until_left_s:
                self._log(stage, share, *window, seconds=now - logged)
                logged, window = now, [0, 0]
            if now - kept >= KEEP_S and stage == "flow":
                self.keep(self.averaged())
                kept = time.monotonic()

    def _log(self, stage: str, share: float, steps: int, samples: int, *, seconds: float) -> None:
        progress, loss = self.progress, float(self.loss_sum) / steps
        self.loss_sum.zero_()
        progress.steps, progress.samples = progress.steps + steps, progress.samples + samples
        measured = {"at_s": self.clock.spent_s(), "loss": loss, "samples_per_s": samples / seconds}
        progress.losses.append({"stage": stage, **{name: round(value, 4) for name, value in measured.items()}})
        self.say(
            f"{stage} {share:6.1%}  loss {loss:.4f}  {samples / seconds:8.0f} samples/s  "
            f"{progress.samples / 1e6:.2f} M samples  {self.clock.left_s():.0f} s left"
        )
        if not math.isfinite(loss):
            raise SystemExit(f"{stage}: the loss is {loss} at step {progress.steps}")


def mixed_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def tune_backends(*, seed: int) -> None:
    torch.manual_seed(seed)
    # cuDNN's attention backward fails at head_dim 32 on sm_90 (torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.suppress_errors = True  # a part that does not compile runs as it is
    torch._dynamo.config.recompile_limit = 64  # sizes x batches x with and without gradients


def falling(share: float) -> float:
    """1 for the first part of a stage, then a cosine down to .01."""
    fall = min(1.0, max(0.0, (share - CONSTANT) / (1 - CONSTANT)))
    return max(0.01, 0.5 + 0.5 * math.cos(math.pi * fall))
