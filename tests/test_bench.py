"""Each benchmark runs at a small size and ends with one JSON line; what it compares is counted fairly."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FLUX2_SCHEDULER, MAX_SEQUENCE_LENGTH, flux2_parts, model_config

from fluxbatch.bench import QUESTIONS, ceilings, cluster, recipes, stored
from fluxbatch.bench.batch_sizes import percent_of_best
from fluxbatch.bench.contestants import Cell, Turn
from fluxbatch.bench.end_to_end import kernel_gaps
from fluxbatch.bench.fidelity import psnr_db
from fluxbatch.bench.headspace import CachedBatch
from fluxbatch.bench.jobs import JobRun, shard_size
from fluxbatch.bench.measure import Limit, parse_size, timed_ms
from fluxbatch.bench.peers import Seat, _order, compare, seconds_per_image
from fluxbatch.command import run_command
from fluxbatch.config import JobConfig, PlanConfig, SamplerConfig
from fluxbatch.models import flux1, flux2, load_model
from fluxbatch.models.checkpoints.recognise import recognise
from fluxbatch.models.tokens import RandomTokenizer
from fluxbatch.pipeline import measure
from fluxbatch.records import Bucket, RowCounts

ROOT = Path(__file__).parent.parent
SMALL = ["model=tiny", "--steps", "1", "--batch-size", "2"]
CASES: dict[str, list[str]] = {
    "ceilings": ["model=tiny", "--size", "64x64", "--batch-size", "1", "--seconds", "0.1"],
    "stages": [*SMALL, "--sizes", "64x64", "--repeats", "1"],
    "headspace": [*SMALL, "--sizes", "64x64", "--seconds", "0.1"],
    "batch_sizes": ["model=tiny", "--steps", "1", "--sizes", "64x64", "--seconds", "0.1", "--up-to", "4"],
    "end_to_end": [*SMALL, "--size", "64x64", "--seconds", "0.1", "--trace"],
    "peers": [*SMALL, "--size", "64x64", "--seconds", "0.1", "--rounds", "1"],
    "host": ["--rows", "40", "--size", "64x64"],
    "fidelity": [
        "model=tiny",
        "--rows",
        "1",
        "--batch-size",
        "1",
        "sampler.height=64",
        "sampler.width=64",
        "sampler.num_inference_steps=6",
    ],
    "pipelines": [*SMALL, "--rows", "3", "--sizes", "64x64"],
    "plan_scale": ["--rows", "2000"],
    "startup": ["model=tiny", "--steps", "1", "--size", "64x64", "--cells", "eager"],
    "resume_scale": ["--shards", "100", "--rows-a-shard", "2", "--world-size", "2"],
    "cluster": ["--gpus", "20", "--rows", "400000"],
}


SLOW = ("batch_sizes", "fidelity", "peers", "resume_scale", "startup")
QUICK = [what for what in CASES if what not in SLOW]


def bench(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process: importing takes seconds."""
    out, err, typed = io.StringIO(), io.StringIO(), sys.argv
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run_command(["bench", *arguments])
    finally:
        sys.argv = typed
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The JSON line of a benchmark, which its result file holds too; each is run once."""

    @cache
    def answer(what: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(what)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "WARM_UP_S", 0.01)
            patch.setattr(measure, "TIMED_S", 0.01)
            code, out, err = bench(what, *CASES[what], "--results", str(folder), "--json")
        assert code == 0, f"{what}: {err}"
        (file,) = folder.iterdir()
        assert file.name.startswith(f"{what}-cpu-")
        assert json.loads(file.read_text()) == json.loads(out)
        return json.loads(out)

    return answer


def test_every_question_has_a_case_here() -> None:
    assert set(CASES) == set(QUESTIONS)


@pytest.mark.parametrize("what", [*QUICK, *(pytest.param(what, marks=pytest.mark.slow) for what in SLOW)])
def test_the_answer_says_what_was_measured_on_what(answers: Callable[[str], dict[str, Any]], what: str) -> None:
    answer = answers(what)
    assert answer["bench"] == what
    assert answer["hardware"]["cores"] >= 1 and answer["versions"]["torch"] == torch.__version__
    assert answer["settings"]["model.dtype"] == "float32" and "commit" in answer


def test_each_answer_has_its_figures(answers: Callable[[str], dict[str, Any]]) -> None:
    assert answers("host")["images"] == 40 and answers("host")["commit_ms_per_batch"] > 0
    assert answers("pipelines")["equal_bytes"] is True
    assert answers("plan_scale")["rows"] == 2000
    assert answers("headspace")["cells"][0]["s_per_image"] > 0
    assert answers("stages")["cells"][0]["step ms"] > 0
    assert answers("ceilings")["floor_ms_per_pass"]["bf16"] > 0
    job = answers("end_to_end")["job"]
    assert job["images"] >= 4 and answers("end_to_end")["percent_of_ceiling"] > 0
    assert set(job["idle_per_batch"]) == {
        "prefetch->launch", "launch->transfer", "transfer->compress", "compress->commit"
    }  # fmt: skip


@pytest.mark.slow
def test_peers_draw_where_they_can_and_say_why_where_they_cannot(answers: Callable[[str], dict[str, Any]]) -> None:
    found = answers("peers")["contestants"]
    assert found["loop"]["s_per_image"] > 0 and found["fluxbatch"]["s_per_image"] > 0
    assert found["fluxbatch"]["times_loop"] > 0
    assert found["lossless"]["error"] == found["torchao_fp8"]["error"] == "needs a CUDA device"
    assert found["fluxbatch_fp8"]["kind"] == "quantised" and found["fluxbatch_fp8"]["s_per_image"] > 0


def test_bench_alone_lists_the_questions() -> None:
    done = subprocess.run([sys.executable, "-m", "fluxbatch", "bench"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and all(what in done.stdout for what in QUESTIONS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["speed"], "bench must be followed by one of"),
        (["headspace", "--seconds", "long"], "bench headspace: argument --seconds: invalid float value: 'long'"),
        (["headspace", "--sizes", "big"], "must be HEIGHTxWIDTH, got 'big'"),
        (["headspace", "model.dtpe=float16"], "did you mean model.dtype"),
        (["peers", "model=tiny", "--peers", "loop,comfy"], "--peers must be of"),
        (["startup", "model=tiny", "--cells", "eager,warm"], "--cells must be of eager, fused"),
    ],
)
def test_wrong_words_are_one_sentence_and_exit_2(arguments: list[str], sentence: str) -> None:
    code, out, err = bench(*arguments)
    assert code == 2 and sentence in err and err.count("\n") == 1 and not out


def test_the_limit_ends_peers_with_what_was_measured() -> None:
    code, out, err = bench("peers", *SMALL, "--size", "64x64", "--seconds", "60", "--limit-s", "4", "--no-results",
                           "--json", "--peers", "loop,fluxbatch")  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    assert answer["contestants"]["loop"]["images"] > 0
    assert sum(len(found["turns"]) for found in answer["contestants"].values()) < 4


@pytest.mark.slow
def test_a_mixed_manifest_is_drawn_whole_by_the_job_and_in_turns_by_the_loop() -> None:
    code, out, err = bench("peers", *SMALL, "--size", "64x64", "--steps", "2", "--mixed", "12", "--rounds", "1",
                           "--seconds", "0.1", "--peers", "loop,fluxbatch", "--alone", "--no-results",
                           "--json")  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    assert len(answer["batch_sizes"]) == 12 and answer["contestants"]["fluxbatch"]["images"] == 12
    assert "s_per_image" not in answer["contestants"]["loop"], "it had no time for a row of each shape"


# --- how it counts ----------------------------------------------------------------------------------------------------


def cell(*, rows: int = 0) -> Cell:
    sampler = SamplerConfig(height=1024, width=1024, num_inference_steps=28, guidance_scale=3.5)
    cfg = JobConfig(model=model_config(), sampler=sampler, plan=PlanConfig(batch_size=2))
    bucket = Bucket(1024, 1024, 28)
    return Cell.mixed(cfg, bucket, rows) if rows else Cell.uniform(cfg, bucket)


def turn(**drawn: tuple[int, float]) -> Turn:
    made = Turn()
    for bucket, (images, seconds) in drawn.items():
        made.add(bucket, images, seconds)
    return made


def test_a_mixed_manifest_has_six_shapes_and_two_step_counts() -> None:
    mixed = cell(rows=200)
    assert len({(row.height, row.width) for row in mixed.rows}) == 6
    assert {row.num_inference_steps for row in mixed.rows} == {28, 20}
    assert len(mixed.rows) == 200 and len({row.id for row in mixed.rows}) == 200


def test_a_loop_that_drew_a_part_is_charged_each_buckets_mean() -> None:
    mixed = cell(rows=18)  # 12 buckets; the first six have two rows each
    seconds = {bucket.name: 1.0 for bucket in mixed.buckets} | {mixed.buckets[0].name: 10.0}
    drawn = turn(**{name: (2, 2 * each) for name, each in seconds.items()})
    assert seconds_per_image([drawn], mixed) == pytest.approx((2 * 10 + 16 * 1) / 18)
    del drawn.images[mixed.buckets[3].name]
    assert seconds_per_image([drawn], mixed) is None, "a bucket that was never drawn has no mean"


def test_turns_of_one_bucket_are_added_up() -> None:
    assert seconds_per_image([turn(b=(2, 4.0)), turn(b=(6, 6.0))], cell()) == pytest.approx(10 / 8)


def test_the_steady_state_leaves_out_the_batch_that_fills_the_pipeline() -> None:
    batches = [(4, 9.0, 30.5), (4, 2.0, 31.5), (3, 2.0, 28.0)]
    lines = [{"rows_ok": ok, "wall_s": wall_s, "peak_allocated_gib": gib} for ok, wall_s, gib in batches]
    done = JobRun(RowCounts(11, 11, 0, 0, 0), 20.0, lines)
    assert done.peak_gib == 31.5
    assert done.steady() == (7, 4.0) and done.whole() == (11, 13.0)


def test_a_batch_size_is_compared_with_the_fastest_one() -> None:
    assert percent_of_best({1: 0.4, 2: 0.25, 4: 0.2}, 2) == 80.0


@pytest.mark.parametrize(("batch_size", "num_rows", "rows"), [(4, 72, 8), (16, 384, 48), (16, 32, 16), ("auto", 72, 9)])
def test_a_measured_jobs_shards_hold_whole_launches(batch_size: int | str, num_rows: int, rows: int) -> None:
    assert shard_size(PlanConfig(batch_size=batch_size, shard_size=1000), num_rows) == rows


@pytest.mark.slow
def test_the_size_that_auto_took_is_swept_too(answers: Callable[[str], dict[str, Any]]) -> None:
    swept = answers("batch_sizes")["cells"][0]
    assert {"1", "2", "4", str(swept["batch_size"])} == set(swept["s_per_image"])


@pytest.mark.slow
def test_startup_tells_the_first_image_from_the_whole_job(answers: Callable[[str], dict[str, Any]]) -> None:
    eager = answers("startup")["cells"]["eager"]
    assert 0 < eager["first image s"] < eager["job s"] and eager["step ms"] > 0 and eager["host GiB"] > 0.1


def test_a_flux2_is_written_as_users_have_it_and_loaded_from_its_nvfp4_file(tmp_path: Path) -> None:
    """Every matrix of the blocks in four bits, with the spread that it is meant to have."""
    parts = flux2_parts(num_text_layers=27)
    settings = {
        "transformer": _settings(parts["transformer"]),
        "text_encoder": parts["text_encoder"].config.to_diff_dict(),
        "vae": _settings(parts["vae"]),
    }
    base = tmp_path / "weights"
    file = stored.write_flux2(base, settings, distilled=True, device=torch.device("cpu"))
    layouts = [module.layout for name, module in recognise(file).modules.items() if "_blocks" in name]
    assert {layout for layout in layouts if layout != "plain"} == {"NVFP4"} and layouts.count("NVFP4") == 10
    cfg = model_config(family="flux2", name="flux2_klein_4b", guidance="none", base=str(base), path=str(file))
    model = load_model(cfg, true_cfg_scale=1.0)
    spread = model._transformer.single_transformer_blocks[0].attn.to_qkv_mlp_proj.weight.std().item()
    assert spread == pytest.approx(stored.SPREAD, rel=0.1)
    cached = CachedBatch(
        model, Bucket(64, 64, 1), JobConfig(model=cfg, sampler=SamplerConfig(guidance_scale=1.0)), size=1
    )
    assert cached.decode(cached.denoise()).shape == (1, 64, 64, 3)


def _settings(component: Any) -> dict[str, Any]:
    return {name: value for name, value in component.config.items() if not name.startswith("_")}


def test_headspace_compares_step_caches_on_one_loaded_model() -> None:
    arguments = ["model=tiny", "--sizes", "64x64", "--steps", "8", "--batch-size", "1", "--seconds", "0.1"]
    code, out, err = bench("headspace", *arguments, "--step-caches", "off", "aggressive", "--no-results", "--json")
    assert code == 0, err
    cells = json.loads(out)["cells"]
    assert [(cell["step_cache"], cell["computed_steps"]) for cell in cells] == [("off", 8), ("aggressive, order 1", 6)]


@pytest.mark.slow
def test_fidelity_measures_each_variant_against_the_exact_pictures(answers: Callable[[str], dict[str, Any]]) -> None:
    found = {variant["name"]: variant for variant in answers("fidelity")["variants"]}
    assert found["float32"]["psnr_db"] is None, "equal to itself"
    assert all(10 < variant["psnr_db"] < 100 for name, variant in found.items() if name != "float32")
    assert [found[f"{name}, order 1"]["steps"] for name in ("conservative", "medium", "aggressive")] == [5, 4, 4]


def test_psnr_is_that_of_all_pixels_together() -> None:
    black, grey = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 51, np.uint8)
    assert psnr_db([black], [black]) is None
    assert psnr_db([grey], [black]) == pytest.approx(13.98, abs=0.01)  # a fifth of the range: 20 log10(5)
    assert psnr_db([grey, black], [black, black]) == pytest.approx(13.98 + 3.01, abs=0.01)


def test_comparisons_are_times_as_fast() -> None:
    found: dict[str, dict[str, Any]] = {"loop": {"s_per_image": 6.0}, "fluxbatch": {"s_per_image": 2.0}, "lossless": {}}
    compare(found)
    assert found["fluxbatch"] == {"s_per_image": 2.0, "times_loop": 3.0}


def test_turns_go_forward_then_backward_or_one_contestant_after_another() -> None:
    assert _order(["a", "b"], 2, alone=False) == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]  # type: ignore[list-item]
    assert _order(["a", "b"], 2, alone=True) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]  # type: ignore[list-item]


def test_a_mixed_manifest_plans_a_batch_size_for_each_shape() -> None:
    mixed = cell(rows=200)
    auto = replace(mixed, cfg=replace(mixed.cfg, plan=PlanConfig()))
    sizes = {bucket.name: auto.batch_size(bucket) for bucket in auto.buckets}
    assert sizes["1024x1024-28"] == 4 < sizes["512x512-28"] <= 16
    assert {mixed.batch_size(bucket) for bucket in mixed.buckets} == {2}


class Broken:
    name, kind, peak_bytes = "broken", "lossless", 0
    closed = False

    def missing(self) -> str | None:
        return None

    def build(self) -> None:
        raise torch.OutOfMemoryError("no room for 24 GB\nand a long table")

    def close(self) -> None:
        self.closed = True


def test_a_contestant_that_fails_is_let_go_and_says_why_once(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Broken()
    seat = Seat(broken, cell())  # type: ignore[arg-type]
    for number in range(2):
        seat.sit(number, 1.0, Limit(None))
    assert seat.figures()["error"] == "OutOfMemoryError: no room for 24 GB" and broken.closed
    assert capsys.readouterr().out.count("no room") == 1


def test_the_longest_pause_between_kernels_is_found_in_the_middle_of_a_trace() -> None:
    millisecond = 1_000_000
    busy = [(start * millisecond, (start + 1) * millisecond) for start in range(100) if start not in (5, 50, 51)]
    found = kernel_gaps([*busy, (busy[40][0], busy[45][1])])  # a copy beside the kernels
    assert found["longest_gap_ms"] == 2.0 and found["gaps_over_1_ms"] == 1
    assert found["busy_percent"] == pytest.approx(96, abs=0.5)


def test_work_is_timed_by_the_call() -> None:
    calls: list[int] = []
    assert timed_ms(lambda: calls.append(1), device=torch.device("cpu"), repeats=3, calls=5, warm_up=2) >= 0
    assert len(calls) == 2 + 3 * 5


def test_a_size_is_height_times_width() -> None:
    assert parse_size("768x1344") == (768, 1344)


def test_ceilings_count_the_products_of_flux1_dev_as_the_paper_does() -> None:
    """59.5 TFLOP a forward at 1024x1024 with 512 text tokens, embedders and modulation left out; 14.9 of attention."""
    cfg = model_config(name="flux1_dev", random_weights=True, max_sequence_length=512)
    shapes = ceilings.transformer_shapes(cfg, Bucket(1024, 1024, 28), batch=1)
    assert sum(p.flop * p.count for p in shapes.products) / 1e12 == pytest.approx(59.5, abs=0.1)
    attention = 4 * shapes.heads * shapes.tokens**2 * shapes.head_dim * shapes.num_blocks
    assert attention / 1e12 == pytest.approx(14.9, abs=0.1)


def test_ceilings_count_the_products_of_klein() -> None:
    cfg = model_config(name="flux2_klein_4b", family="flux2", random_weights=True, max_sequence_length=512)
    shapes = ceilings.transformer_shapes(cfg, Bucket(1024, 1024, 4), batch=1)
    assert sum(p.flop * p.count for p in shapes.products) / 1e12 == pytest.approx(28.3, abs=0.1)


# --- the peers' recipes -----------------------------------------------------------------------------------------------


def draw(pipe: Any) -> np.ndarray:
    image = pipe(
        prompt="a red circle on a blue background",
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=3.5,
        generator=torch.Generator("cpu").manual_seed(7),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
    ).images[0]
    return np.asarray(image).astype(int)


def test_a_fused_copy_draws_the_same_and_shares_every_weight_that_it_did_not_make() -> None:
    cfg = model_config()
    parts = recipes.components(cfg)
    loop = recipes.pipeline(cfg, dict(parts))
    before = draw(loop)
    copied = recipes.sharing_weights(parts["transformer"])
    fused = recipes.pipeline(cfg, {**parts, "transformer": copied})
    recipes.fuse(fused)
    assert np.abs(draw(fused) - before).max() <= 1
    assert (draw(loop) == before).all() and not loop.transformer.transformer_blocks[0].attn.fused_projections
    shared = {p.data_ptr() for p in parts["transformer"].parameters()}
    assert {p.data_ptr() for p in fused.transformer.parameters()} > shared
    assert recipes.resident_bytes(fused) > recipes.resident_bytes(loop)


@pytest.mark.parametrize(("guidance", "guided"), [("none", False), ("classifier_free", True)])
def test_kleins_pipeline_encodes_text_with_random_tokens_and_knows_if_it_is_distilled(
    guidance: str, guided: bool
) -> None:
    cfg = model_config(family="flux2", guidance=guidance)
    parts = flux2_parts(num_text_layers=30)
    parts["tokenizer"] = RandomTokenizer(vocab_size=264, eos_token_id=1, pad_token_id=0, model_max_length=512)
    pipe = recipes.pipeline(cfg, recipes.as_pipeline_takes({**parts, "scheduler_config": FLUX2_SCHEDULER}))
    assert draw(pipe).shape == (64, 64, 3)
    assert pipe.do_classifier_free_guidance is guided


def test_flux1s_pipeline_takes_random_tokens_and_cuts_long_prompts() -> None:
    tokenizer = recipes.PipelineTokenizer(
        RandomTokenizer(vocab_size=506, eos_token_id=1, pad_token_id=0, model_max_length=77)
    )
    assert tokenizer(["a b c"], max_length=8, padding="max_length").input_ids.shape == (1, 8)
    assert tokenizer(["a b c"], padding="longest").input_ids.shape == (1, 4)
    assert tokenizer("a b", max_length=3)["attention_mask"].tolist() == [[1, 1, 1]]


def test_fp8_is_for_wide_block_linears_that_are_used() -> None:
    wide, narrow = torch.nn.Linear(3072, 8), torch.nn.Linear(64, 8)
    chosen = recipes._wide_block_linear
    assert chosen(wide, "transformer_blocks.0.attn.to_qkv") and chosen(wide, "single_transformer_blocks.1.proj_mlp")
    assert not chosen(wide, "transformer_blocks.0.attn.to_q"), "its fused copy is used instead"
    assert not chosen(wide, "transformer_blocks.0.norm1.linear") and not chosen(wide, "proj_out")
    assert not chosen(narrow, "transformer_blocks.0.attn.to_qkv")


@pytest.mark.slow
def test_the_lossless_recipe_draws_what_the_loop_draws() -> None:
    """Compiles on the CPU: minutes."""
    cfg = model_config()
    parts = recipes.components(cfg)
    loop = recipes.pipeline(cfg, dict(parts))
    before = draw(loop)
    quick = recipes.pipeline(cfg, {**parts, "transformer": recipes.sharing_weights(parts["transformer"])})
    recipes.lossless(quick)
    assert np.abs(draw(quick) - before).max() <= 2


def test_results_name_no_folder_of_this_machine(answers: Callable[[str], dict[str, Any]]) -> None:
    for answer in map(answers, QUICK):
        assert str(Path.home()) not in json.dumps(answer["options"]) and "folder" not in answer["options"]


SMALL_VAE = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
SMALL_BLOCKS = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}


def small_flux1(monkeypatch: pytest.MonkeyPatch) -> str:
    width = {"pooled_projection_dim": 32, "joint_attention_dim": 32, "in_channels": 16, "axes_dims_rope": (4, 4, 8)}
    dev = flux1.RANDOM["flux1_dev"]
    small = {**dev, "transformer": {**dev["transformer"], **SMALL_BLOCKS, **width}}
    monkeypatch.setitem(flux1.RANDOM, "flux1_dev", small)
    monkeypatch.setattr(flux1, "VAE", {**flux1.VAE, **SMALL_VAE, "latent_channels": 4})
    heads = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}
    monkeypatch.setattr(flux1, "CLIP_L", {**flux1.CLIP_L, **heads})
    monkeypatch.setattr(
        flux1, "T5_XXL", {**flux1.T5_XXL, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 1, "num_heads": 4}
    )
    return "flux1_dev"


def small_klein(monkeypatch: pytest.MonkeyPatch) -> str:
    klein = flux2.RANDOM["flux2_klein_base_4b"]
    width = {"joint_attention_dim": 48, "in_channels": 128, "axes_dims_rope": (4, 4, 4, 4)}
    qwen = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8}  # fmt: skip
    small = {"transformer": {**klein["transformer"], **SMALL_BLOCKS, **width},
             "text_encoder": {**klein["text_encoder"], **qwen}}  # fmt: skip
    monkeypatch.setitem(flux2.RANDOM, "flux2_klein_base_4b", small)
    monkeypatch.setattr(flux2, "AutoencoderKLFlux2", partial(flux2.AutoencoderKLFlux2, **SMALL_VAE))
    return "flux2_klein_base_4b"


@pytest.mark.parametrize("family", [small_flux1, pytest.param(small_klein, marks=pytest.mark.slow)])
def test_peers_draw_with_random_weights_and_the_loops_own_dtype(
    family: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings that the full-size models have, at a thousandth of their width."""
    name = family(monkeypatch)
    code, out, err = bench("peers", f"model={name}", "model.random_weights=true", "--size", "64x64", "--steps", "1",
                           "--batch-size", "2", "--seconds", "0.1", "--rounds", "1", "--peers", "loop,fluxbatch",
                           "--baseline-dtype", "float32", "--no-results", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)["contestants"]
    assert found["loop"].get("images", 0) > 0 and found["fluxbatch"].get("images", 0) > 0, found


def test_helping_ranks_bounds_what_a_slow_gpu_costs_and_failures_cost_batches_only():
    fleet = cluster.Fleet(gpus=10, image_s=1.0, batch=4, shard_rows=100, spread=0.0, slow=0.1, slow_factor=2.0,
                          mtbf_h=2.0, restart_s=60.0)  # fmt: skip
    fleets = fleet, replace(fleet, helping=False)
    helped, alone = (cluster.simulate(of, rows=100_000, seed=0) for of in fleets)
    assert helped.wall_h < 0.75 * alone.wall_h and helped.idle_gpu_h < 10 * 200 / 3600
    assert helped.failures and helped.lost_gpu_h == pytest.approx(helped.failures * 6.0 / 3600)


def test_the_calls_of_a_batch_are_few_and_do_not_grow_with_the_job(tmp_path: Path):
    sampler = SamplerConfig(height=64, width=64, num_inference_steps=2, guidance_scale=1.0)
    cfg = JobConfig(model=model_config(), sampler=sampler)

    def calls(batches: int) -> float:
        (tmp_path / str(batches)).mkdir()
        return cluster.count_operations(cfg, tmp_path / str(batches), batches=batches)["batch"].total()

    few, many = calls(4), calls(16)
    assert many <= few + 0.5 and few < 13
