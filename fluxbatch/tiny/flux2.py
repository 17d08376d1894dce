"""A FLUX.2 of the same size as one network to train: transformer and Qwen3 together. Knows no objective, no data.

It reads hidden states 9, 18 and 27 of its Qwen3, as FLUX.2-klein does, so that diffusers' pipeline draws with it as it
is; hence 28 thin layers. text_encoder/config.json says so too. Its VAE has the architecture of the embedded FLUX.1's,
and the batch norm of FLUX.2 in place of two numbers.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from fluxbatch.klein import SCHEDULER, TEXT_ENCODER_LAYERS, text_encoder_layers
from fluxbatch.tiny import FOLDER, FOLDERS, NAMES
from fluxbatch.tiny.export import defaults
from fluxbatch.tiny.flow import Rotary, Text, TokenIds
from fluxbatch.tiny.flux1 import start_transformer
from fluxbatch.tiny.vae import Vae
from fluxbatch.tiny.writer import Writer

# B batch, S text tokens, D width of the text encoder, L packed latent tokens, C channels of a packed token

TEXT_TOKENS = 32  # what captions are padded to: the longest of 20,000 has 27
NUM_TEXT_LAYERS = max(TEXT_ENCODER_LAYERS) + 1  # the last one's state would come through the final norm
WIDTH = 64
TRANSFORMER = {
    "in_channels": 64,
    "num_layers": 3,
    "num_single_layers": 8,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "joint_attention_dim": len(TEXT_ENCODER_LAYERS) * WIDTH,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (8, 8, 8, 8),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (24, 48, 80, 112),
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 8,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 128,
}
VOCABULARY = 700
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
)

Pipeline = Any  # diffusers' lazy imports hide its attributes from mypy


class Flux2(nn.Module):
    """Transformer and text encoder in float32, trained together. Without guidance, as the distilled klein."""

    name = "flux2"
    folder = FOLDERS[NAMES[name]]
    text_tokens = TEXT_TOKENS
    guided = False

    def __init__(self, transformer: Any, qwen3: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.transformer, self.qwen3 = transformer, qwen3
        self.read_layers = text_encoder_layers(qwen3.config.to_dict())
        for unread in (*qwen3.model.layers[max(self.read_layers) :], qwen3.model.norm):
            unread.requires_grad_(False)

    @staticmethod
    def template(work: Path) -> Path:
        """A pipeline folder of random weights, made anew in `work`: the tokenizer is learned from captions."""
        folder = work / "template"
        tokenizer = learned_tokenizer()
        vae = AutoencoderKLFlux2(**VAE)
        transformer, qwen3 = Flux2Transformer2DModel(**TRANSFORMER), random_qwen3(tokenizer)
        parts = {"transformer": transformer, "text_encoder": qwen3, "vae": vae}
        scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
        pipeline: Any = Flux2KleinPipeline(scheduler=scheduler, tokenizer=tokenizer, is_distilled=True, **parts)
        pipeline.save_pretrained(folder)
        return folder

    @classmethod
    def load(cls, folder: Path) -> Self:
        kind: dict[str, Any] = {"torch_dtype": torch.float32, "local_files_only": True}
        return cls(
            Flux2Transformer2DModel.from_pretrained(folder / "transformer", **kind),
            Qwen3ForCausalLM.from_pretrained(folder / "text_encoder", dtype=torch.float32, local_files_only=True),
        )

    @classmethod
    def fresh(cls, folder: Path) -> Self:
        net = cls.load(folder)
        with torch.no_grad():
            start_transformer(net.transformer)
        return net

    @staticmethod
    def fresh_vae(folder: Path) -> Vae:
        return AutoencoderKLFlux2(**VAE)

    @staticmethod
    def load_vae(folder: Path) -> Vae:
        return AutoencoderKLFlux2.from_pretrained(folder / "vae", local_files_only=True)

    @classmethod
    def shipped_vae(cls) -> Vae:
        """The embedded FLUX.1's, around a batch norm that is yet to be measured."""
        vae = cls.fresh_vae(FOLDER)
        vae.load_state_dict(
            AutoencoderKL.from_pretrained(FOLDER / "vae", local_files_only=True).state_dict(), strict=False
        )
        return vae

    @staticmethod
    def tokenise(folder: Path) -> "partial[tuple[np.ndarray, ...]]":
        """A function of captions that worker processes can be sent: Qwen3 ids and their mask, (N, S) int16."""
        return partial(_token_ids, folder=folder)

    def embed(self, ids: TokenIds) -> Text:
        """(B, S, 3 D): what a token and those before it say, after each of the layers that are read."""
        token_ids, real = ids
        model = self.qwen3.model
        states, features = model.embed_tokens(token_ids), []
        places = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        seen = real.bool()[:, None, None, :] & (places.mT >= places)
        rotary = model.rotary_emb(states, places)
        for number, layer in enumerate(model.layers[: max(self.read_layers)], start=1):
            states = layer(states, attention_mask=seen, position_ids=places, position_embeddings=rotary)
            if number in self.read_layers:
                features.append(states)
        return (torch.cat(features, -1),)

    def velocity(self, latents: Tensor, *, sigma: Tensor, guidance: Tensor, text: Text, rotary: Rotary) -> Tensor:
        """Flux2Transformer2DModel.forward with the time in float32 and ready rotary tables; `guidance` has no say.
        latents (B, L, C); sigma (B,) float32."""
        model = self.transformer
        tokens, context = model.x_embedder(latents), model.context_embedder(text[0])
        temb = model.time_guidance_embed(sigma * 1000, None)
        image_mod, text_mod = model.double_stream_modulation_img(temb), model.double_stream_modulation_txt(temb)
        for block in model.transformer_blocks:
            context, tokens = block(
                hidden_states=tokens,
                encoder_hidden_states=context,
                temb_mod_img=image_mod,
                temb_mod_txt=text_mod,
                image_rotary_emb=rotary,
            )
        states, single_mod = torch.cat([context, tokens], dim=1), model.single_stream_modulation(temb)
        for block in model.single_transformer_blocks:
            states = block(
                hidden_states=states, encoder_hidden_states=None, temb_mod=single_mod, image_rotary_emb=rotary
            )
        return model.proj_out(model.norm_out(states[:, context.shape[1] :], temb))

    def rotary(self, height: int, width: int) -> Rotary:
        device = next(self.parameters()).device
        zero = torch.zeros(1, dtype=torch.int64)
        words, lines, columns = (torch.arange(num) for num in (TEXT_TOKENS, height // 16, width // 16))
        text = torch.cartesian_prod(zero, zero, zero, words)
        return self.transformer.pos_embed(
            torch.cat([text, torch.cartesian_prod(zero, lines, columns, zero)]).to(device)
        )

    def compile_parts(self) -> None:
        """Compiles each kind of block for the first size it meets, then once more for all other sizes."""
        blocks = (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks)
        for part in (*blocks, *self.qwen3.model.layers[: max(self.read_layers)]):
            part.compile()

    def pipeline(self, folder: Path, vae: Vae) -> Pipeline:
        """The folder's pipeline around these weights."""
        parts = {"transformer": self.transformer, "text_encoder": self.qwen3, "vae": vae}
        return Flux2KleinPipeline.from_pretrained(folder, local_files_only=True, **parts)

    @staticmethod
    def stored_pipeline(folder: Path, dtype: torch.dtype) -> Pipeline:
        return Flux2KleinPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)

    @staticmethod
    def call_settings(folder: Path) -> dict[str, Any]:
        """What a call of the folder's pipeline must be told of its weights."""
        layers = text_encoder_layers(Qwen3Config.from_pretrained(folder / "text_encoder").to_dict())
        return {
            "max_sequence_length": defaults(folder)["max_sequence_length"],
            "text_encoder_out_layers": layers,
        }


def random_qwen3(tokenizer: Any) -> Qwen3ForCausalLM:
    read: dict[str, Any] = {"text_encoder_out_layers": list(TEXT_ENCODER_LAYERS)}  # ours: Qwen3 has no such setting
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=NUM_TEXT_LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            **read,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def learned_tokenizer(num_captions: int = 20_000) -> Qwen2Tokenizer:
    """Byte pairs of captions of the little language; every byte has a token, so that no text is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    writer = Writer(99)
    captions = [writer.caption(writer.scene()) for _ in range(num_captions)]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        [f"user\n{caption}" for caption in captions],
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    table = json.loads(learner.to_str())["model"]
    merges: Any = [tuple(pair) for pair in table["merges"]]  # pairs of pieces; declared as strings
    tokenizer = Qwen2Tokenizer(vocab=table["vocab"], merges=merges, model_max_length=512)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _token_ids(captions: list[str], folder: Path) -> tuple[np.ndarray, ...]:
    tokenizer = _tokenizer(folder)
    turns = [[{"role": "user", "content": caption}] for caption in captions]
    texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    found = tokenizer(texts, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="np")
    return found.input_ids.astype(np.int16), found.attention_mask.astype(np.int16)


@cache
def _tokenizer(folder: Path) -> Any:
    return Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
