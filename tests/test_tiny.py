"""The embedded model's language, its renderer, its judge and the tensors of its training. The weights are not asked."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2Transformer2DModel
from omegaconf import OmegaConf
from tiny_models import qwen_tokenizer

from fluxbatch import tiny
from fluxbatch.tiny import flow
from fluxbatch.tiny.checkpoint import Checkpoint, load_pieces, save_pieces
from fluxbatch.tiny.data import SMOKE_SHARES
from fluxbatch.tiny.examination import Question, examination, score
from fluxbatch.tiny.export import pack_model
from fluxbatch.tiny.flow import HIGH_NOISE, HIGH_NOISE_SHARE, Bucket, distillation_loss, draw_sigma, flow_loss
from fluxbatch.tiny.flux1 import CLIP_TOKENS, TEXT_TOKENS, Flux1
from fluxbatch.tiny.flux2 import TRANSFORMER, Flux2, random_qwen3
from fluxbatch.tiny.install import Place, install, install_model, with_examination, with_run, with_text_length
from fluxbatch.tiny.judge import judge
from fluxbatch.tiny.measure import components
from fluxbatch.tiny.optim import Optimizer, copy_of, orthogonalized
from fluxbatch.tiny.reader import read_caption
from fluxbatch.tiny.rehearse import rehearse
from fluxbatch.tiny.render import Atlas, render
from fluxbatch.tiny.scenes import Scene, Thing
from fluxbatch.tiny.scores import settings_of
from fluxbatch.tiny.trainer import falling
from fluxbatch.tiny.vae import packed
from fluxbatch.tiny.words import held_out
from fluxbatch.tiny.writer import Writer

SMOKE = ("--smoke", "--minutes", "1", "--reserve-s", "30")


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return Atlas()


@pytest.fixture(scope="module")
def net() -> Flux1:
    return Flux1.load(Flux1.folder).eval()


def truth(atlas: Atlas, questions: list, *, height: int, width: int) -> np.ndarray:
    rows = torch.from_numpy(np.stack([question.row(atlas.index) for question in questions]))
    return render(rows, atlas.textures, height=height, width=width).permute(0, 2, 3, 1).numpy()


# ---------------------------------------------------------------- the language


def test_every_caption_is_read_back_as_the_scene_it_was_written_for() -> None:
    writer = Writer(5)
    for _ in range(1500):
        scene = writer.scene()
        caption = writer.caption(scene)
        assert read_caption(caption) == scene, caption


def test_training_never_shows_a_held_out_pair() -> None:
    writer = Writer(6)
    for _ in range(1500):
        scene = writer.scene()
        assert not any(thing.color and held_out(thing.color, thing.noun) for thing in scene.things), scene
        if len(scene.things) == 2:
            assert not held_out(scene.things[0].noun, scene.things[1].noun), scene


@pytest.mark.parametrize("text", ["", "a portrait of an old man", "a circle", "red circle and", "five red circles"])
def test_other_texts_are_not_read_as_scenes(text: str) -> None:
    assert read_caption(text) is None


def test_synonyms_places_and_backgrounds_are_understood() -> None:
    read = read_caption("A picture of a tiny crimson heart, top left on a turquoise background.")
    assert read == Scene((Thing("heart", "red"),), place="top left", size="small", background="cyan")
    assert read_caption("two kittens at night") == Scene((Thing("cat", None, 2),), background="night")
    assert read_caption("an owl above a pumpkin") == Scene((Thing("owl"), Thing("pumpkin")), relation="above")


# ---------------------------------------------------------------- the judge


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 160), (256, 256)])
def test_the_judge_passes_the_truth_and_refuses_the_truth_of_other_prompts(
    atlas: Atlas, height: int, width: int
) -> None:
    questions = examination(3, seed=height)
    pictures = truth(atlas, questions, height=height, width=width)
    assert set(score(questions, pictures).values()) == {1.0}
    shuffled = score(questions, np.roll(pictures, 8, axis=0))
    assert max(shuffled.values()) <= 1 / 3, shuffled
    assert np.mean(list(shuffled.values())) < 0.1, shuffled


def test_the_examination_asks_in_the_little_language() -> None:
    for question in examination(12):
        assert read_caption(question.prompt) == question.scene, question.prompt


def test_held_out_questions_ask_for_pairs_that_training_never_saw() -> None:
    for question in examination(12):
        if question.kind.endswith("held out"):
            first, *others = question.scene.things
            pair = (first.noun, others[0].noun) if others else (str(first.color), first.noun)
            assert held_out(*pair), question


def test_stray_pixels_do_not_change_the_verdict(atlas: Atlas) -> None:
    (question,) = [q for q in examination(1) if q.kind == "object"]
    picture = truth(atlas, [question], height=128, width=128)[0].copy()
    picture[5, 5:8] = picture[120:122, 118] = 0.3
    assert all(judge(picture, question.scene).values())


@pytest.mark.parametrize(
    "drawn",
    [
        Scene((Thing("square", "red"), Thing("circle", "blue")), relation="left", background="white"),  # shapes swapped
        Scene((Thing("circle", "blue"), Thing("square", "red")), relation="left", background="white"),  # places swapped
        Scene((Thing("circle", "red"), Thing("square", "blue")), relation="above", background="white"),
        Scene((Thing("circle", "red"),), background="white"),
    ],
)
def test_a_relation_wants_the_right_shapes_in_the_right_places(atlas: Atlas, drawn: Scene) -> None:
    asked = Scene((Thing("circle", "red"), Thing("square", "blue")), relation="left", background="white")
    picture = truth(atlas, [Question("", "", asked), Question("", "", drawn)], height=128, width=128)
    assert judge(picture[0], asked)["relation"]
    assert not judge(picture[1], asked)["relation"]


def test_sceneries_are_left_unjudged() -> None:
    scene = Scene((Thing("circle", "red"),), background="night")
    assert judge(np.zeros((128, 128, 3)), scene) == {}


def test_an_empty_picture_fails_every_kind() -> None:
    questions = examination(2)
    blank = [np.full((128, 128, 3), 0.97, np.float32)] * len(questions)
    assert set(score(questions, blank).values()) == {0.0}


def test_components_join_across_lines_and_drop_specks() -> None:
    mask = np.zeros((40, 40), bool)
    mask[5:30, 5] = mask[5:30, 9] = mask[29, 5:10] = True  # a U: two arms that meet at the last line
    mask[35, 30:33] = True  # a speck
    mask[0:10, 20:30] = True
    pieces = components(mask)
    assert [int(piece.sum()) for piece in pieces] == [100, 53]
    assert components(np.zeros((8, 8), bool)) == []


def test_a_run_folder_is_scored_from_its_prompts(atlas: Atlas, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    from fluxbatch.tiny.score import pictures, summary, verdicts

    questions = [q for q in examination(1) if q.kind in ("shape", "count")]
    drawn = truth(atlas, questions, height=128, width=128)
    images = [Image.fromarray((picture * 255).astype(np.uint8)) for picture in (*drawn, drawn[0])]
    prompts = [question.prompt for question in questions] + ["a portrait of an old man"]
    (tmp_path / "data").mkdir()
    rows = datasets.Dataset.from_dict({"prompt": prompts, "image": images}).cast_column("image", datasets.Image())
    rows.to_parquet(str(tmp_path / "data" / "shard-00000.parquet"))
    found = summary(verdicts(pictures(tmp_path)))
    assert (found["judged"], found["right"], found["unjudged"], found["wrong"]) == (2, 2, 1, [])


# ---------------------------------------------------------------- the training


def test_velocity_is_what_diffusers_computes(net: Flux1) -> None:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 24, 64, generator=generator)
    token_ids = tuple(
        torch.from_numpy(ids).long() for ids in Flux1.tokenise(Flux1.folder)(["a red circle", "two cats"])
    )
    ids = torch.zeros(4, 6, 3)
    ids[..., 1] += torch.arange(4)[:, None]
    ids[..., 2] += torch.arange(6)[None]
    sigma, guidance = torch.tensor([0.3, 0.9]), torch.tensor([1.0, 3.5])
    with torch.no_grad():
        text = net.embed(token_ids)
        ours = net.velocity(latents, sigma=sigma, guidance=guidance, text=text, rotary=net.rotary(64, 96))
        theirs = net.transformer(
            hidden_states=latents,
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=text[0],
            pooled_projections=text[1],
            img_ids=ids.view(-1, 3),
            txt_ids=torch.zeros(TEXT_TOKENS, 3),
            return_dict=False,
        )[0]
    torch.testing.assert_close(ours, theirs)


def test_text_and_velocity_of_flux2_are_what_diffusers_computes() -> None:
    torch.manual_seed(4)
    tokenizer = qwen_tokenizer()
    net = Flux2(Flux2Transformer2DModel(**TRANSFORMER), random_qwen3(tokenizer)).eval()
    token_ids, mask = tokenizer(["a red circle", "two cats"], padding="max_length", max_length=32).values()
    ids = (torch.tensor(token_ids), torch.tensor(mask))
    latents, sigma = torch.randn(2, 24, 64), torch.tensor([0.3, 0.9])
    grids = ((1, 1, 1, 32), (1, 4, 6, 1))
    txt_ids, img_ids = (torch.cartesian_prod(*(torch.arange(side) for side in grid)) for grid in grids)
    with torch.no_grad():
        (text,) = net.embed(ids)
        states = net.qwen3(*ids, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer] for layer in (9, 18, 27)], -1)
        ours = net.velocity(latents, sigma=sigma, guidance=sigma, text=(text,), rotary=net.rotary(64, 96))
        theirs = net.transformer(
            hidden_states=latents,
            timestep=sigma,
            guidance=None,
            encoder_hidden_states=text,
            img_ids=img_ids,
            txt_ids=txt_ids,
            return_dict=False,
        )[0]
    torch.testing.assert_close(text, wanted)
    torch.testing.assert_close(ours, theirs)


def one_picture(net: Flux1) -> tuple[Bucket, tuple[torch.Tensor, ...]]:
    """A bucket of the same caption and latents four times, and its caption's ids."""
    ids = tuple(torch.from_numpy(some) for some in Flux1.tokenise(Flux1.folder)(["a red circle"]))
    latents = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(3)).repeat(4, 1, 1)
    bucket = Bucket(32, 32, 4, latents, tuple(some.repeat(4, 1) for some in ids), net.rotary(32, 32))
    return bucket, tuple(some.long() for some in ids)


def test_one_step_lowers_the_loss_and_moves_the_average(net: Flux1) -> None:
    bucket, empty = one_picture(net)
    before, average = copy_of(net.parameters()), copy_of(net.parameters())
    optimizer = Optimizer(net, average)
    optimizer.learning_rate.fill_(1e-3)
    optimizer.average_decay.fill_(0.5)
    losses = []
    for _ in range(4):
        torch.manual_seed(1)
        loss = flow_loss(net, bucket, empty=empty)
        optimizer.step(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = [not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
    assert sum(moved) > 0.95 * len(moved)
    halfway = torch.lerp(before[0], next(net.parameters()), 0.5)
    assert not torch.equal(average[0], before[0])
    assert (average[0] - halfway).abs().max() < (before[0] - halfway).abs().max()


def test_what_is_distilled_depends_on_what_the_teacher_says_without_a_caption(net: Flux1) -> None:
    bucket, empty = one_picture(net)
    with torch.no_grad():
        same, other = (
            net.embed(tuple(some.long() for some in bucket.ids)),
            net.embed(tuple(torch.ones_like(some) for some in empty)),
        )
    losses = []
    for empty_text in (tuple(part[:1] for part in same), other):
        torch.manual_seed(2)
        losses.append(distillation_loss(net, bucket, empty=empty, teacher=net, empty_text=empty_text).item())
    assert losses[0] != losses[1]


def test_a_rehearsal_calls_each_size_as_training_does_and_leaves_nothing(
    net: Flux1, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[torch.Size, torch.Size]] = []
    velocity = net.velocity

    def seen(latents: torch.Tensor, **conditions: Any) -> torch.Tensor:
        called.append((latents.shape, conditions["text"][0].shape))
        return velocity(latents, **conditions)

    monkeypatch.setattr(net, "velocity", seen)
    before = copy_of(net.parameters())
    empty = tuple(torch.from_numpy(ids).long() for ids in Flux1.tokenise(Flux1.folder)([""]))
    done = list(rehearse(net, [replace(share, batch_size=2) for share in SMOKE_SHARES], empty=empty))
    assert called == [((2, 16, 64), (2, 32, 128)), ((2, 8, 64), (2, 32, 128))]
    assert [line.partition(":")[0] for line in done] == ["64x64", "32x64"]
    assert all(torch.equal(old, new) and new.grad is None for old, new in zip(before, net.parameters(), strict=True))


def test_a_network_without_guidance_sees_few_empty_captions(monkeypatch: pytest.MonkeyPatch, net: Flux1) -> None:
    bucket, empty = one_picture(net)
    shares: list[float] = []
    draw = flow.draw

    def seen(bucket: Bucket, *, empty: Any, empty_share: float) -> flow.Noised:
        shares.append(empty_share)
        return draw(bucket, empty=empty, empty_share=empty_share)

    monkeypatch.setattr(flow, "draw", seen)
    for guided in (True, False):
        monkeypatch.setattr(net, "guided", guided, raising=False)
        flow_loss(net, bucket, empty=empty)
    assert shares == [0.1, 0.02]


def test_orthogonalized_matrices_keep_their_directions_and_lose_their_sizes() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 64), (2, 64, 24)):
        singular = torch.linalg.svdvals(orthogonalized(torch.randn(shape)).float())
        assert singular.min() > 0.5
        assert singular.max() < 1.4


def test_noise_levels_are_shifted_as_the_scheduler_does_and_often_high() -> None:
    torch.manual_seed(0)
    for num_tokens, mu in ((64, 0.5), (1024, 1.15)):
        sigma = draw_sigma(20_000, num_tokens=num_tokens, device=torch.device("cpu"))
        middle = np.exp(mu) / (1 + np.exp(mu))  # half of the scheduler's levels are below
        assert (sigma < middle).float().mean() == pytest.approx(0.5 * (1 - HIGH_NOISE_SHARE), abs=0.02)
        assert (sigma > HIGH_NOISE).float().mean() > HIGH_NOISE_SHARE


def test_the_learning_rate_falls_to_a_hundredth_and_never_rises() -> None:
    rates = [falling(share) for share in np.linspace(0, 1.2, 50)]
    assert (rates[0], rates[-1]) == (1.0, 0.01)
    assert rates == sorted(rates, reverse=True)


def test_latents_are_packed_in_the_order_of_the_pipeline() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(2, 16, 8, 12)
    assert torch.equal(packed(latents), FluxPipeline._pack_latents(latents, 2, 16, 8, 12))


def test_no_caption_is_longer_than_the_token_columns() -> None:
    writer = Writer(9)
    clip_ids, t5_ids = Flux1.tokenise(Flux1.folder)([writer.caption(writer.scene()) for _ in range(500)])
    assert (clip_ids.shape[1], t5_ids.shape[1]) == (CLIP_TOKENS, TEXT_TOKENS)
    assert (t5_ids[:, -1] == 0).all()  # padding
    assert (clip_ids[:, -1] == clip_ids.max()).all()


@pytest.mark.parametrize("family", [Flux1, Flux2])
def test_the_settings_of_an_embedded_model_are_what_its_training_is(family: Any) -> None:
    settings = OmegaConf.load(Place.of(family.name).settings)
    assert (settings.name, settings.family) == (tiny.NAMES[family.name], family.name)
    assert settings.max_sequence_length == family.text_tokens
    assert settings.guidance == ("embedded" if family.guided else "none")
    assert settings.negative_prompts == family.guided  # which also means that a second pass says something


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_the_settings_pad_captions_as_the_training_of_the_shipped_weights_did(family: str) -> None:
    place = Place.of(family)
    if not place.folder.is_dir():
        pytest.skip(f"{place.folder.name}: these weights are not trained yet")
    assert with_text_length(place.settings.read_text(), place.folder) == place.settings.read_text()


def test_the_readme_promises_no_model_without_weights() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for name, folder in tiny.FOLDERS.items():
        assert folder.is_dir() or f"`{name}`" not in readme


def test_installing_weights_takes_over_their_text_length(tmp_path: Path) -> None:
    (tmp_path / "defaults.json").write_text('{"max_sequence_length": 7}')
    assert with_text_length("dtype: float32\nmax_sequence_length: 64\n", tmp_path) == (
        "dtype: float32\nmax_sequence_length: 7\n"
    )
    with pytest.raises(SystemExit, match="one line with a max_sequence_length, it has 0"):
        with_text_length("dtype: float32\n", tmp_path)


def test_pieces_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxbatch.tiny.checkpoint.PIECE_BYTES", 4)
    save_pieces(bytes(range(11)), tmp_path, "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.00", "checkpoint.01", "checkpoint.02"]
    assert load_pieces(tmp_path, "checkpoint") == bytes(range(11))
    save_pieces(bytes(3), tmp_path, "checkpoint")
    assert load_pieces(tmp_path, "checkpoint") == bytes(3), "nothing of the longer one before is left"
    assert load_pieces(tmp_path / "absent", "checkpoint") is None


def test_a_checkpoint_gives_back_what_was_kept(tmp_path: Path) -> None:
    network = {"w": torch.tensor([0.5, -2.0]), "seen": torch.tensor(7)}
    Checkpoint("flux1", network, {"v": torch.ones(2)}, {"scaling_factor": 0.9}, steps=3, samples=40).save(tmp_path)
    kept = Checkpoint.load(tmp_path)
    assert (kept.model, kept.steps, kept.samples, kept.vae_numbers) == ("flux1", 3, 40, {"scaling_factor": 0.9})
    assert kept.network["w"].tolist() == [0.5, -2.0]
    assert kept.network["seen"] == 7


def test_a_folder_without_a_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--from must be a folder with checkpoint"):
        Checkpoint.load(tmp_path)


def test_a_model_is_installed_whole_or_not_at_all(tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    for folder in (place, out, tmp_path / "new"):
        folder.mkdir()
    (place / "old.json").write_text("{}")
    with pytest.raises(SystemExit, match="has no model"):
        install_model(out, place)
    assert (place / "old.json").exists()
    (tmp_path / "new" / "weights").write_bytes(b"12345")
    pack_model(tmp_path / "new", out)
    assert install_model(out, place) == 5
    assert [path.name for path in place.iterdir()] == ["weights"]


def run_of(model: str) -> dict[str, Any]:
    """What a training run's run.json holds."""
    losses = [{"stage": "flow", "loss": loss, "samples_per_s": 9000.0} for loss in (0.5, 0.25)]
    return {
        "model": model,
        "arguments": {"minutes": "8.0", "source": "shipped"},
        "device": "one GPU",
        "torch": "2.11",
        "trained_s": 240.0,
        "samples": 6_500_000,
        "losses": losses,
        "scores": {"8x8": {"shape": 0.123, "shape: color": 1.0}},
        "num_prompts": {"8x8": 48},
    }


@pytest.mark.parametrize("model", ["flux1", "flux2"])
def test_an_installed_run_adds_its_line_and_replaces_the_scores(model: str) -> None:
    before, run = Place.of(model).record.read_text(), run_of(model)
    text = with_run(with_run(before, run), run)
    assert text.count("| one GPU, torch 2.11 | 4.0 | 6.5 M | 9,000 | 0.500 to 0.250 |") == 2
    assert text.count("| 8x8 | one GPU | 48 | 0.123 |") == 1
    scores = text.partition(f"<!-- scores of {model} -->")[2].partition("<!-- end of the scores of")[0]
    assert [line.split("|")[1].strip() for line in scores.splitlines() if line][2:] == ["8x8"]
    assert "no weights" not in scores
    other = "flux2" if model == "flux1" else "flux1"
    mark = f"<!-- scores of {other} -->"
    assert text.partition(mark)[2].partition("<!--")[0] == before.partition(mark)[2].partition("<!--")[0]


def test_a_run_without_time_for_scores_says_so() -> None:
    text = with_run(Place.of("flux2").record.read_text(), run_of("flux2") | {"scores": {}})
    assert "<!-- scores of flux2 -->\n\nNo scores: the run had no time left for them.\n" in text


@pytest.mark.parametrize(("num_prompts", "kept"), [(47, "one GPU | 48 | 0.123"), (48, "CPU | 48 | 0.500")])
def test_an_examination_completes_the_table_and_replaces_no_line_of_more_prompts(num_prompts: int, kept: str) -> None:
    first = with_run(Place.of("flux1").record.read_text(), run_of("flux1"))
    later = {"model": "flux1", "device": "CPU", "num_prompts": {"8x8": num_prompts, "16x16": 16}}
    text = with_examination(first, later | {"scores": {"16x16": {"shape": 1.0}, "8x8": {"shape": 0.5}}})
    scores = text.partition("<!-- scores of flux1 -->")[2].partition("<!-- end of the scores of flux1 -->")[0]
    assert scores.split("\n")[4:-2] == [f"| 8x8 | {kept} |", "| 16x16 | CPU | 16 | 1.000 |"]
    with pytest.raises(SystemExit, match="other columns"):
        with_examination(first, later | {"scores": {"8x8": {"color": 1.0}}})


def test_an_examination_of_other_weights_is_refused(tmp_path: Path) -> None:
    run = {"model": "flux1", "weights": "0123456789abcdef", "scores": {}, "num_prompts": {}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    before = Place.of("flux1").record.read_text()
    with pytest.raises(SystemExit, match="of other weights than those in"):
        install(tmp_path)
    assert Place.of("flux1").record.read_text() == before


def test_what_is_installed_goes_into_the_checkout_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "defaults.json").write_text('{"max_sequence_length": 7}')
    pack_model(tmp_path / "new", tmp_path / "out")
    (tmp_path / "out" / "run.json").write_text(json.dumps(run_of("flux2")))
    place = Place.of("flux2", tmp_path)
    for path, source in ((place.record, Place.of("flux2").record), (place.settings, Place.of("flux2").settings)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text())
    assert "one more run, 1 settings" in install(tmp_path / "out", tmp_path)
    assert place.folder == tmp_path / "fluxbatch" / "tiny" / "model_flux2"
    assert (place.folder / "defaults.json").exists()
    assert "| 8x8 | one GPU | 48 |" in place.record.read_text()
    kept = json.loads(place.losses.read_text())
    assert [line["loss"] for line in kept["losses"]] == [0.5, 0.25]
    assert kept["command"] == "python -m fluxbatch.tiny.train --minutes 8.0 --model flux2 --from shipped"
    assert "\nmax_sequence_length: 7\n" in place.settings.read_text()


def test_a_model_without_guidance_has_no_setting_twice_and_none_with_guidance() -> None:
    names = [setting.name for setting in settings_of(guided=False)]
    assert len(names) == len(set(names))
    assert not any("guidance" in name for name in names)
    guided = [setting.name for setting in settings_of(guided=True)]
    for wanted in ("bfloat16", "float16", ", 4 steps", ", 8 steps", "192x192", "192x320", "320x192", "256x256"):
        assert any(wanted in name for name in names) and any(wanted in name for name in guided), wanted


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source"), [("flux1", "nothing"), ("flux2", "vae")])
def test_a_smoke_run_trains_exports_scores_and_goes_on(tmp_path: Path, model: str, source: str) -> None:
    command = [sys.executable, "-m", "fluxbatch.tiny.train", "--model", model, *SMOKE]
    subprocess.run([*command, "--from", source, "--out", str(tmp_path / "a")], check=True)
    subprocess.run([*command, "--from", str(tmp_path / "a"), "--out", str(tmp_path / "b")], check=True)
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in "ab")
    assert second["scores"]["control: ground truth, 128x128"]["shape"] == 1.0
    assert second["steps"] > first["steps"] > 0
    assert (tmp_path / "b" / "model.tar.00").exists()
