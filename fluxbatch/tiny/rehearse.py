"""Compiles what a training run will need while that run makes its data: in a process of its own, into Inductor's cache.

What the run does not find there it compiles for itself. A thread would not do: compiling holds the interpreter, and the
data's every operation would wait for it. Trains nothing and knows no data.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fluxbatch.tiny.data import SHARES, Share
from fluxbatch.tiny.families import FAMILIES
from fluxbatch.tiny.flow import Bucket, TokenIds, flow_loss
from fluxbatch.tiny.trainer import mixed_precision, tune_backends


@contextmanager
def rehearsal(family: str, template: Path, *, device: torch.device, log: Path) -> Iterator[None]:
    """Beside what the caller does, and no longer. The caller has its GPU already, which may serve one process only."""
    if device.type != "cuda":
        yield
        return
    command = [sys.executable, "-m", "fluxbatch.tiny.rehearse", "--model", family, "--template", str(template)]
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            yield
        finally:
            process.kill()


def rehearse(net: Any, shares: Sequence[Share], *, empty: TokenIds) -> Iterator[str]:
    """Forward and backward of each size on blank data, as training calls them; yields what is done."""
    device = next(net.parameters()).device
    if device.type == "cuda":
        net.compile_parts()
    for share in shares:
        bucket, start = blank(net, share, empty=empty), time.monotonic()
        with mixed_precision(device):
            loss = flow_loss(net, bucket, empty=empty)
        loss.backward()
        net.zero_grad(set_to_none=True)
        yield f"{share.height}x{share.width}: {time.monotonic() - start:.1f} s"


def blank(net: Any, share: Share, *, empty: TokenIds) -> Bucket:
    """A bucket of one batch, without captions and pictures."""
    shape = (share.batch_size, share.height * share.width // 256, net.transformer.config.in_channels)
    ids = tuple(some.expand(share.batch_size, -1).short() for some in empty)
    latents = torch.zeros(shape, device=empty[0].device)
    rotary = net.rotary(share.height, share.width)
    return Bucket(share.height, share.width, share.batch_size, latents, ids, rotary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, required=True)
    parser.add_argument("--template", type=Path, required=True, help="folder of configurations and tokenizers")
    args = parser.parse_args()
    tune_backends(seed=0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = FAMILIES[args.model].fresh(args.template).to(device).eval()
    empty = tuple(torch.from_numpy(ids).to(device).long() for ids in net.tokenise(args.template)([""]))
    for done in rehearse(net, SHARES, empty=empty):
        print(done, flush=True)


if __name__ == "__main__":
    main()
