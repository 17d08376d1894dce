"""The embedded FLUX.1 as one network to train: transformer, CLIP and T5 together. Knows no objective, no data."""

from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from fluxbatch.tiny import FOLDERS, NAMES
from fluxbatch.tiny.export import defaults
from fluxbatch.tiny.flow import Rotary, Text, TokenIds
from fluxbatch.tiny.vae import Vae

# B batch, S text tokens, D their width, L packed latent tokens, C channels of a packed token

# What captions are padded to, here and in conf/model/tiny.yaml: FLUX masks no padding. The longest of 20,000 captions
# has 26 T5 tokens and 20 CLIP tokens.
TEXT_TOKENS = 32
CLIP_TOKENS = 24

Pipeline = Any  # diffusers' lazy imports hide its attributes from mypy


class Flux1(nn.Module):
    """Transformer and both text encoders in float32; all three are trained together."""

    name = "flux1"
    folder = FOLDERS[NAMES[name]]
    text_tokens = TEXT_TOKENS
    guided = True

    def __init__(self, transformer: Any, clip: CLIPTextModel, t5: T5EncoderModel) -> None:
        super().__init__()
        self.transformer, self.clip, self.t5 = transformer, clip, t5

    @classmethod
    def template(cls, work: Path) -> Path:
        """A folder with configurations, tokenizers and scheduler: that of the shipped weights."""
        return cls.folder

    @classmethod
    def load(cls, folder: Path) -> Self:
        kind: dict[str, Any] = {"torch_dtype": torch.float32, "local_files_only": True}
        text: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
        return cls(
            FluxTransformer2DModel.from_pretrained(folder / "transformer", **kind),
            CLIPTextModel.from_pretrained(folder / "text_encoder", **text),
            T5EncoderModel.from_pretrained(folder / "text_encoder_2", **text),
        )

    @classmethod
    def fresh(cls, folder: Path) -> Self:
        """Random weights; modulations and output start at zero (Peebles and Xie 2022, arXiv:2212.09748)."""
        config = FluxTransformer2DModel.load_config(folder / "transformer")
        clip = CLIPTextModel(CLIPTextConfig.from_pretrained(folder / "text_encoder")).float()
        t5 = T5EncoderModel(T5Config.from_pretrained(folder / "text_encoder_2")).float()
        net = cls(FluxTransformer2DModel.from_config(config), clip, t5)
        with torch.no_grad():
            start_transformer(net.transformer)
            t5.shared.weight.normal_(std=1.0)
            clip.get_input_embeddings().weight.normal_(std=0.05)
        return net

    @staticmethod
    def fresh_vae(folder: Path) -> Vae:
        return AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae"))

    @staticmethod
    def load_vae(folder: Path) -> Vae:
        return AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True)

    @classmethod
    def shipped_vae(cls) -> Vae:
        return cls.load_vae(cls.folder)

    @staticmethod
    def tokenise(folder: Path) -> "partial[tuple[np.ndarray, ...]]":
        """A function of captions that worker processes can be sent: CLIP and T5 ids, (N, S) int16."""
        return partial(_token_ids, folder=folder)

    def embed(self, ids: TokenIds) -> Text:
        """(B, S, D) text tokens and (B, D) pooled."""
        clip_ids, t5_ids = ids
        return self.t5(input_ids=t5_ids)[0], self.clip(input_ids=clip_ids).pooler_output

    def velocity(self, latents: Tensor, *, sigma: Tensor, guidance: Tensor, text: Text, rotary: Rotary) -> Tensor:
        """FluxTransformer2DModel.forward without its round trips: under autocast that one casts the time to bf16,
        and it builds the rotary tables anew at each call. latents (B, L, C); sigma, guidance (B,) float32."""
        model = self.transformer
        tokens, context = model.x_embedder(latents), model.context_embedder(text[0])
        temb = model.time_text_embed(sigma * 1000, guidance * 1000, text[1])
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            context, tokens = block(
                hidden_states=tokens, encoder_hidden_states=context, temb=temb, image_rotary_emb=rotary
            )
        return model.proj_out(model.norm_out(tokens, temb))

    def rotary(self, height: int, width: int) -> Rotary:
        lines, columns = height // 16, width // 16
        ids = torch.zeros(lines, columns, 3)
        ids[..., 1] += torch.arange(lines)[:, None]
        ids[..., 2] += torch.arange(columns)[None]
        device = next(self.parameters()).device
        return self.transformer.pos_embed(torch.cat([torch.zeros(TEXT_TOKENS, 3), ids.view(-1, 3)]).to(device))

    def compile_parts(self) -> None:
        """Compiles each kind of block for the first size it meets, then once more for all other sizes."""
        blocks = (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks)
        for part in (*blocks, self.t5, self.clip):
            part.compile()

    def pipeline(self, folder: Path, vae: Vae) -> Pipeline:
        """The folder's pipeline around these weights."""
        parts = {"transformer": self.transformer, "text_encoder": self.clip, "text_encoder_2": self.t5, "vae": vae}
        return FluxPipeline.from_pretrained(folder, local_files_only=True, **parts)

    @staticmethod
    def stored_pipeline(folder: Path, dtype: torch.dtype) -> Pipeline:
        return FluxPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)

    @staticmethod
    def call_settings(folder: Path) -> dict[str, Any]:
        """What a call of the folder's pipeline must be told of its weights."""
        return {"max_sequence_length": defaults(folder)["max_sequence_length"]}


def start_transformer(transformer: nn.Module) -> None:
    """Zero modulations and output, Xavier matrices, zero biases."""
    for name, parameter in transformer.named_parameters():
        silent = ("norm" in name and ".linear." in name) or "modulation" in name
        if silent or name.startswith(("proj_out", "norm_out")):
            parameter.zero_()
        elif parameter.ndim == 2:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith("bias"):
            parameter.zero_()


def _token_ids(captions: list[str], folder: Path) -> tuple[np.ndarray, ...]:
    clip, t5 = _tokenizers(folder)
    settings = {"padding": "max_length", "truncation": True, "return_tensors": "np"}
    clip_ids = clip(captions, max_length=CLIP_TOKENS, **settings).input_ids
    return clip_ids.astype(np.int16), t5(captions, max_length=TEXT_TOKENS, **settings).input_ids.astype(np.int16)


@cache
def _tokenizers(folder: Path) -> tuple[Any, Any]:
    return CLIPTokenizer.from_pretrained(folder / "tokenizer"), T5Tokenizer.from_pretrained(folder / "tokenizer_2")
