"""Turn token ids into embeddings, each distinct prompt once while it is wanted. Knows nothing of noise or pixels.

Every launch has the same number of prompts, padded with the empty one: bits do not depend on who is encoded beside
whom. Legend: N prompts, S text tokens, B rows, D embedding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fluxbatch.models import Model, PromptEmbeds
from fluxbatch.pipeline.prefetch import TokenizedBatch, TokenRow, token_row
from fluxbatch.pipeline.transfer import Streams, finite_rows


@dataclass(frozen=True, slots=True)
class Encoded:
    """One prompt on the device: its embeddings (S, D) and whether all of them are finite (0-d bool)."""

    embeds: PromptEmbeds
    finite: Tensor


class PromptEncoder:
    """Owns the embeddings on the device: the last `capacity` prompts, and whatever the window still needs."""

    def __init__(self, model: Model, streams: Streams, *, launch_size: int, capacity: int) -> None:
        self._model = model
        self._streams = streams
        self._launch_size = launch_size
        self._capacity = capacity
        self._cache: OrderedDict[str, Encoded] = OrderedDict()  # least recently wanted first
        self._padding = token_row(model.tokenize([""]).tensors, 0)

    def prepare(self, batch: TokenizedBatch, upcoming: Sequence[TokenizedBatch]) -> None:
        """Encode what the batch lacks; free places of those launches go to the batches that follow."""
        for text in batch.tokens.keys() & self._cache.keys():
            self._cache.move_to_end(text)
        lacking = self._lacking([batch])
        if lacking:
            free_places = -len(lacking) % self._launch_size
            following = {text: row for text, row in self._lacking(upcoming).items() if text not in lacking}
            self._encode([*lacking.items(), *islice(following.items(), free_places)])
        self._evict(keep=[batch, *upcoming])

    def rows(self, texts: Sequence[str]) -> tuple[PromptEmbeds, Tensor]:
        """Embeddings (B, S, D) and finite flags (B,) of prepared prompts, one a row."""
        found = [self._cache[text] for text in texts]
        embeds = {name: torch.stack([entry.embeds[name] for entry in found]) for name in found[0].embeds}
        return embeds, torch.stack([entry.finite for entry in found])

    def _lacking(self, batches: Iterable[TokenizedBatch]) -> dict[str, TokenRow]:
        return {text: row for batch in batches for text, row in batch.tokens.items() if text not in self._cache}

    def _encode(self, wanted: Sequence[tuple[str, TokenRow]]) -> None:
        for first in range(0, len(wanted), self._launch_size):
            launch = wanted[first : first + self._launch_size]
            padding = [self._padding] * (self._launch_size - len(launch))
            encoded = _each_prompt(self._launch([row for _, row in launch] + padding))
            self._cache.update(zip((text for text, _ in launch), encoded, strict=False))

    def _launch(self, rows: Sequence[TokenRow]) -> PromptEmbeds:
        with torch.cuda.stream(self._streams.copy_in):
            # A few KB from pageable memory: the driver has read them when the call returns, so nothing guards them.
            tokens = {
                name: torch.stack([row[name] for row in rows]).to(self._model.device, non_blocking=True)
                for name in rows[0]
            }
        self._streams.join(self._streams.compute, after=self._streams.copy_in, reads=tokens.values())
        embeds = self._model.encode(tokens)
        for name, tensor in embeds.items():
            if tensor.shape[0] != len(rows):
                raise ValueError(f"the text encoder gave {tensor.shape[0]} {name} for {len(rows)} prompts")
        return embeds

    def _evict(self, *, keep: Iterable[TokenizedBatch]) -> None:
        if len(self._cache) <= self._capacity:
            return
        wanted = {text for batch in keep for text in batch.tokens}
        spare = [text for text in self._cache if text not in wanted]
        for text in spare[: len(self._cache) - self._capacity]:
            del self._cache[text]


def _each_prompt(embeds: PromptEmbeds) -> Iterator[Encoded]:
    """Copies: a view would keep the whole launch alive, or show the next one where the model replays a CUDA graph.

    Non-finite embeddings become zeros: their row fails, and must not reach its neighbours through a shared scale.
    """
    finite_N = torch.stack([finite_rows(tensor) for tensor in embeds.values()]).all(0)
    for index, finite in enumerate(finite_N):
        yield Encoded({name: torch.where(finite, tensor[index], 0) for name, tensor in embeds.items()}, finite)
