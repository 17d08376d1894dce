"""The optimiser and the captured training step. Knows parameters and CUDA graphs; knows neither losses nor data.

Nothing here waits for the device, so that a whole step (batch, forward, backward, update, average) is one graph.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0


def orthogonalized(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrices of a stack (N, rows, columns) by five Newton-Schulz steps; the coefficients are
    Keller Jordan's (Muon, kellerjordan.github.io/posts/muon)."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for the matrices of the blocks, AdamW for all else; and the exponential moving average of both.

    Muon's update has AdamW's size (Liu et al. 2025, arXiv:2502.16982), so that one learning rate serves both. It works
    on stacks of equal shapes: torch.optim.Muon takes the 90 matrices one by one, 20 kernels each.
    """

    def __init__(self, net: nn.Module, average: list[Tensor]) -> None:
        named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self.parameters: list[Tensor] = [p for _, p in named]
        self.average = average
        self.average_decay = torch.zeros((), device=self.parameters[0].device)  # on the device: a graph reads it anew
        self.learning_rate = torch.zeros((), device=self.parameters[0].device)
        matrices = [p for name, p in named if p.ndim == 2 and ("block" in name or "layers" in name)]
        matrices = [p for p in matrices if min(p.shape) > 32]  # not T5's table of relative positions
        self.stacks: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            self.stacks.setdefault(matrix.shape, []).append(matrix)
        self.momentum = {shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self.stacks.items()}
        chosen = {id(p) for p in matrices}
        on_gpu = self.learning_rate.is_cuda
        self.rest = torch.optim.AdamW(
            [p for p in self.parameters if id(p) not in chosen],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
            capturable=on_gpu,
        )

    def step(self, loss: Tensor) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM, foreach=True)
        self.rest.step()
        with torch.no_grad():
            for shape, matrices in self.stacks.items():
                self._muon(shape, matrices)
            torch._foreach_mul_(self.average, self.average_decay)
            torch._foreach_add_(self.average, torch._foreach_mul(self.parameters, 1 - self.average_decay))

    def _muon(self, shape: torch.Size, matrices: list[Tensor]) -> None:
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        momentum = self.momentum[shape].lerp_(gradients, 1 - MOMENTUM)
        update = orthogonalized(gradients.lerp_(momentum, MOMENTUM)).float()
        update = update * (0.2 * max(shape) ** 0.5 * self.learning_rate)
        torch._foreach_mul_(matrices, 1 - self.learning_rate * WEIGHT_DECAY)
        torch._foreach_sub_(matrices, list(update.unbind()))


class Recorder:
    """Turns steps into CUDA graphs that share one memory pool: they are replayed one after another, never together."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as one launch. It runs three times first: compilation and new state precede capture."""
        if not torch.cuda.is_available():
            return step
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                step()
        except RuntimeError as error:  # slower, but the lease is not lost
            self.say(f"no CUDA graph, going on launch by launch: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            return step
        return graph.replay


@torch.no_grad()
def copy_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]
