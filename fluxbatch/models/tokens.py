"""Prompts to token ids of a fixed length. Knows no model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def tokenize_fixed(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> tuple[Tensor, Tensor, tuple[bool, ...]]:
    """Ids and attention mask, both (N, max_length), and which texts were cut.

    Padding to the longest text instead would make a row's embedding depend on its neighbours.
    """
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=max_length, return_tensors="pt")
    truncated = tuple(bool(encoding.overflowing) for encoding in encoded.encodings)
    return encoded.input_ids, encoded.attention_mask, truncated


class RandomTokenizer:
    """Words to ids by CRC-32: stands in for a tokenizer where the weights are random too.

    For measuring speed. It gives the shapes and lengths of the real one, the same in every process, and means nothing.
    """

    def __init__(self, *, vocab_size: int, eos_token_id: int, pad_token_id: int, model_max_length: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.model_max_length = model_max_length

    def __call__(self, texts: Sequence[str], *, max_length: int, **_: Any) -> SimpleNamespace:
        words = [[self._id(word) for word in text.split()] for text in texts]
        kept = [[*ids[: max_length - 1], self.eos_token_id] for ids in words]
        padded = [ids + [self.pad_token_id] * (max_length - len(ids)) for ids in kept]
        mask = [[1] * len(ids) + [0] * (max_length - len(ids)) for ids in kept]
        overflow = [SimpleNamespace(overflowing=ids[max_length - 1 :]) for ids in words]
        return SimpleNamespace(input_ids=torch.tensor(padded), attention_mask=torch.tensor(mask), encodings=overflow)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return messages[-1]["content"]

    def _id(self, word: str) -> int:
        return 2 + zlib.crc32(word.encode()) % (self.vocab_size - 4)  # clear of the special ids at either end
