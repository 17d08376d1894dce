"""Both embedded models draw what their prompts ask for, however they are run. A judge without a learned model looks."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fluxbatch.command import run_command
from fluxbatch.tiny.score import pictures, summary, verdicts

PROMPTS = (
    "a red circle on a blue background",
    "a green triangle",
    "a yellow star on a black background",
    "a purple heart in the top left corner",
    "a pink square on a white background",
    "two orange diamonds",
    "three blue circles",
    "a red square to the left of a green circle",
)
MODELS = ("tiny", "tiny_flux2")
QUICK = "model.dtype=float32"
SLOW = (
    "model.dtype=bfloat16",
    "model.quantization=int8",
    "model.quantization=fp8_weight_only",
    "sampler.step_cache=conservative",
    "sampler.step_cache=aggressive",
    "plan.batch_size=1",
    "pipeline=serial",
    "model.kernels=fused",
)


@pytest.mark.parametrize("setting", [QUICK, *(pytest.param(word, marks=pytest.mark.slow) for word in SLOW)])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_asked_for_is_drawn(tmp_path: Path, model: str, setting: str) -> None:
    rows = {"id": [f"row-{number}" for number in range(len(PROMPTS))], "prompt": list(PROMPTS)}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    size = ["sampler.height=128", "sampler.width=128", "sampler.num_inference_steps=12"]
    words = [f"model={model}", "model.device=cpu", "plan.batch_size=3", *size, f"manifest.path={tmp_path}/rows.parquet"]
    assert run_command([*words, setting, f"output.dir={tmp_path}/run"]) == 0
    found = summary(verdicts(pictures(tmp_path / "run")))
    assert (found["judged"], found["unjudged"]) == (len(PROMPTS), 0)
    assert found["wrong"] == []
