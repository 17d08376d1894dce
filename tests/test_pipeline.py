"""The stages alone and together: order, overlap, bounded memory, failures, shutdown. A fake model paints each row."""

import io
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_model import MAX_PROMPT_CHARACTERS, FakeModel, expected_pixels
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fluxbatch.config import ModelConfig, OutputConfig, PipelineConfig
from fluxbatch.errors import ProcessLost
from fluxbatch.pipeline import compress, transfer
from fluxbatch.pipeline.decode import launch_size, to_uint8
from fluxbatch.pipeline.encode import PromptEncoder
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.pipeline.prefetch import draw_noise, tokenize
from fluxbatch.pipeline.ring import Channel, Slot, Stopped
from fluxbatch.pipeline.transfer import Streams
from fluxbatch.records import Batch, BatchPlan, Bucket, CompressedBatch, Request

MODES = ("serial", "double_buffered")
SMALL = Bucket(16, 24, 4)
PATIENCE_S = 5.0
TOO_LONG_S = 0.2


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fluxbatch")]


def request(name: str, *, bucket: Bucket = SMALL, seed: int | None = None, **other) -> Request:
    fields = {"prompt": f"prompt of {name}", "negative_prompt": None, "guidance_scale": 3.5} | other
    size = {"height": bucket.height, "width": bucket.width, "num_inference_steps": bucket.num_inference_steps}
    return Request(id=name, seed=hash_seed(name) if seed is None else seed, **size, **fields)


def hash_seed(name: str) -> int:
    return int.from_bytes(name.encode()[-7:], "big")


def as_batch(index: int, requests: list[Request], *, bucket: Bucket = SMALL, size: int | None = None) -> Batch:
    plan = BatchPlan(index, 7, bucket, index * 100, len(requests), size or len(requests))
    return Batch(plan, tuple(requests))


def batches(count: int, *, rows: int = 3, bucket: Bucket = SMALL, **other) -> list[Batch]:
    return [
        as_batch(index, [request(f"b{index}r{row}", bucket=bucket, **other) for row in range(rows)], bucket=bucket)
        for index in range(count)
    ]


def run(source, model=None, *, mode="double_buffered", draining=lambda: False, image_format="png", **settings):
    model_keys = {"encode_batch_size", "decode_max_pixels"}
    model_cfg = ModelConfig(**{key: settings.pop(key) for key in model_keys & settings.keys()})
    return run_pipeline(
        source,
        model or FakeModel(),
        pipeline=PipelineConfig(**{"mode": mode, "compress_workers": 2} | settings),
        model_cfg=model_cfg,
        output=OutputConfig(image_format=image_format, png_level=1),
        draining=draining,
    )


def pixels_of(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)))


def images(done: list[CompressedBatch]) -> dict[str, bytes]:
    return {result.id: result.image for batch in done for result in batch.results if result.image is not None}


def failures(done: list[CompressedBatch]) -> dict[str, tuple[str, str]]:
    rows = [result for batch in done for result in batch.results if result.failure]
    return {result.id: (result.failure.stage, result.failure.reason) for result in rows}


def assert_each_id_has_its_own_picture(done: list[CompressedBatch]) -> None:
    for batch in done:
        for asked, result in zip(batch.batch.requests, batch.results, strict=True):
            if result.image is not None:
                np.testing.assert_array_equal(pixels_of(result.image), expected_pixels(asked, batch.batch.bucket))


def wait_for(event: threading.Event, patience_s: float = PATIENCE_S) -> None:
    if not event.wait(patience_s):
        raise TimeoutError("the handshake never came")


MIXED = [
    as_batch(0, [request(name, bucket=Bucket(32, 24, 4)) for name in ("a", "ä, 猫")], bucket=Bucket(32, 24, 4), size=4),
    *batches(2, rows=4, bucket=Bucket(24, 32, 2)),
    as_batch(3, [request("big seed", seed=2**64 - 1), request("negative seed", seed=-(2**63))], size=5),
    as_batch(
        4,
        [
            request("n1", bucket=Bucket(16, 16, 3, True), negative_prompt="blurry", guidance_scale=2.0),
            request("n2", bucket=Bucket(16, 16, 3, True), negative_prompt=None, guidance_scale=7.25),
        ],
        bucket=Bucket(16, 16, 3, True),
        size=3,
    ),
]


@pytest.mark.parametrize("mode", MODES)
def test_each_id_gets_the_picture_of_its_own_seed_prompt_and_guidance(mode: str) -> None:
    done = list(run(MIXED, mode=mode))
    assert [batch.batch.plan.index for batch in done] == [batch.plan.index for batch in MIXED]
    assert all(batch.num_failed == 0 for batch in done)
    assert_each_id_has_its_own_picture(done)


def test_serial_and_double_buffered_give_equal_bytes() -> None:
    serial, double = (list(run(MIXED, mode=mode, image_format="jpeg")) for mode in MODES)
    assert [batch.results for batch in serial] == [batch.results for batch in double]


@pytest.mark.parametrize("mode", MODES)
def test_br17_other_neighbours_slots_and_order_give_the_same_bytes(mode: str) -> None:
    rows = [request(f"r{index}") for index in range(12)]
    shuffled = random.Random(5).sample(rows, 12)
    in_order = run([as_batch(index, rows[index * 4 :][:4]) for index in range(3)], mode=mode)
    alone_and_padded = run([as_batch(index, [row], size=4) for index, row in enumerate(shuffled)], mode=mode)
    assert images(list(in_order)) == images(list(alone_and_padded))


def test_noise_is_what_a_fresh_cpu_generator_draws() -> None:
    noise = torch.empty(2, 16, 8, 8)[1]
    draw_noise(noise, seed=-5)
    assert torch.equal(noise, torch.randn(1, 16, 8, 8, generator=torch.Generator("cpu").manual_seed(-5))[0])


@pytest.mark.parametrize("mode", MODES)
def test_every_launch_of_a_bucket_has_the_planned_size(mode: str) -> None:
    model = FakeModel()
    source = [*batches(2, rows=4), as_batch(2, [request("tail")], size=4)]
    done = list(run(source, model, mode=mode))
    assert set(model.rows) == {4} and set(model.decoded_rows) == {4}
    assert [len(batch.results) for batch in done] == [4, 4, 1]
    assert_each_id_has_its_own_picture(done)


# --- overlap and bounds -----------------------------------------------------------------------------------------------


def overlapped_prefetch(mode: str, patience_s: float) -> list[CompressedBatch]:
    next_is_prefetched = threading.Event()
    model = FakeModel()

    def hook(stage: str, call: int) -> None:
        if stage == "noise" and call == 3:
            next_is_prefetched.set()
        if stage == "velocity" and call == 1 + SMALL.num_inference_steps:  # batch 1 denoises
            wait_for(next_is_prefetched, patience_s)

    model.hook = hook
    return list(run(batches(4), model, mode=mode))


def test_a_batch_is_prefetched_while_the_one_before_denoises() -> None:
    assert len(overlapped_prefetch("double_buffered", PATIENCE_S)) == 4
    with pytest.raises(TimeoutError):
        overlapped_prefetch("serial", TOO_LONG_S)


def overlapped_compression(monkeypatch: pytest.MonkeyPatch, mode: str, patience_s: float) -> list[CompressedBatch]:
    denoising, compressing = threading.Event(), threading.Event()
    plain = compress.compress

    def slow_compress(pixels, asked, output):
        if asked.id == "b0r0":
            compressing.set()
            wait_for(denoising, patience_s)
        return plain(pixels, asked, output)

    def hook(stage: str, call: int) -> None:
        if stage == "velocity" and call == 1 + SMALL.num_inference_steps:
            wait_for(compressing, patience_s)
            denoising.set()

    monkeypatch.setattr(compress, "compress", slow_compress)
    return list(run(batches(3), FakeModel(hook=hook), mode=mode))


def test_a_batch_is_compressed_while_the_next_denoises(monkeypatch: pytest.MonkeyPatch) -> None:
    done = overlapped_compression(monkeypatch, "double_buffered", PATIENCE_S)
    assert [batch.num_failed for batch in done] == [0, 0, 0]
    serial = overlapped_compression(monkeypatch, "serial", TOO_LONG_S)
    assert serial[0].results[0].failure.reason == "codec_error"  # the handshake timed out inside the codec


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_br22_prefetch_stays_depth_batches_ahead_and_the_window_holds_prompts_only(depth: int) -> None:
    window, pulled, window_is_full = 4, itertools.count(1), threading.Event()
    model = FakeModel()
    noise_drawn = []

    def source() -> Iterator[Batch]:
        for batch in batches(20):
            if next(pulled) == 1 + depth + window:  # one denoises, `depth` are staged: the next waits for a slot
                window_is_full.set()
            yield batch

    def hook(stage: str, call: int) -> None:
        if stage == "velocity" and call == 1:
            wait_for(window_is_full)
            noise_drawn.append(model.calls["noise"])

    model.hook = hook
    assert len(list(run(source(), model, depth=depth, encode_window=window))) == 20
    assert noise_drawn == [1 + depth]


def test_br33_a_writer_that_sleeps_holds_the_device_back() -> None:
    model, depth = FakeModel(), 2
    steps = SMALL.num_inference_steps
    done = run(batches(40), model, depth=depth)
    next(done)
    time.sleep(0.3)
    launched = model.calls["velocity"] / steps
    assert launched <= 1 + 2 * (depth + 1) + depth  # taken, compressed, on the way, and in the slots
    assert len(list(done)) == 39


def test_br26_a_slot_is_refilled_only_after_its_compressors_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, next_arrived = compress.compress, threading.Event()
    plain_receive = transfer.receive

    def receive(launched):
        if launched.tokenized.batch.plan.index == 1:
            next_arrived.set()
        return plain_receive(launched)

    def slow_compress(pixels, asked, output):
        if asked.id.startswith("b0"):
            assert not next_arrived.wait(0.2), "the only slot was refilled while it is read"
        return plain(pixels, asked, output)

    monkeypatch.setattr(compress, "compress", slow_compress)
    monkeypatch.setattr(transfer, "receive", receive)
    done = list(run(batches(3), depth=1))
    assert not failures(done)
    assert_each_id_has_its_own_picture(done)


def test_br22_host_buffers_grow_to_the_largest_batch_and_are_reused() -> None:
    slot = Slot(pinned=False)
    large = slot.carve(((4, 32, 32, 3), torch.uint8), ((4, 3), torch.bool))
    addresses = {large[0].data_ptr()}
    for rows in (1, 3, 4, 2):
        pixels, flags = slot.carve(((rows, 16, 16, 3), torch.uint8), ((rows, 3), torch.bool))
        addresses.add(pixels.data_ptr())
        assert pixels.is_contiguous() and flags.shape == (rows, 3)
    assert len(addresses) == 1


# --- exceptions and shutdown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stage", "call", "place"),
    [
        ("tokenize", 4, "stage prefetch, shard 7, batch 2, 16x24"),  # the first call is for the padding prompt
        ("noise", 3, "stage prefetch, shard 7, batch 2, 16x24"),
        ("encode", 1, "stage encode, shard 7, batch 0, 16x24"),
        ("velocity", 9, "stage denoise, shard 7, batch 2, 16x24"),
        ("decode", 3, "stage decode, shard 7, batch 2, 16x24"),
    ],
)
def test_br33_an_exception_of_any_stage_ends_the_run_with_its_place(mode, stage, call, place) -> None:
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=f"fake failure of {stage}") as caught:
        list(run(batches(30), FakeModel(fail_at={stage: call}), mode=mode))
    assert caught.value.__notes__ == [place]
    assert "_called" in [entry.name for entry in caught.traceback]  # its own traceback, down to where it was raised
    assert time.monotonic() - start_s < PATIENCE_S


@pytest.mark.parametrize("mode", MODES)
def test_br33_an_exception_of_the_source_or_of_the_copy_ends_the_run(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> Iterator[Batch]:
        yield from batches(2)
        raise OSError("plan.parquet: gone")

    with pytest.raises(OSError, match="gone"):
        list(run(source(), mode=mode))

    def lost(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Slot, "wait", lambda self: lost(self) if sys._getframe(1).f_code.co_name == "receive" else None)
    sentence = "stage transfer, shard 7, batch 0, 16x24: CUDA error: unspecified launch failure"
    with pytest.raises(ProcessLost, match=sentence):
        list(run(batches(9), mode=mode))


def test_batches_on_the_host_before_the_failure_are_still_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = threading.Event()
    plain = compress.submit

    def submit(*args, **kwargs):
        compressing = plain(*args, **kwargs)
        if compressing.host.batch.plan.index == 1:
            submitted.set()
        return compressing

    def hook(stage: str, call: int) -> None:
        if stage == "velocity" and call == 9:
            wait_for(submitted)
            time.sleep(0.05)  # from submission to the channel
            raise ValueError("late")

    monkeypatch.setattr(compress, "submit", submit)
    done = []
    with pytest.raises(ValueError, match="late"):
        for batch in run(batches(5), FakeModel(hook=hook)):
            done.append(batch)
    assert [batch.batch.plan.index for batch in done] == [0, 1]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_early_ends_every_thread(taken: int) -> None:
    done = run(itertools.chain.from_iterable(batches(3) for _ in itertools.count()))
    for _ in range(taken):
        next(done)
    done.close()  # the fixture looks for threads


def test_closing_stops_a_long_denoise_at_its_next_step() -> None:
    model, second_batch = FakeModel(), threading.Event()
    long = Bucket(16, 24, 10_000)

    def hook(stage: str, call: int) -> None:
        if stage == "velocity" and call > SMALL.num_inference_steps:
            second_batch.set()
            time.sleep(0.001)

    model.hook = hook
    done = run([*batches(1), *batches(1, bucket=long)], model)
    next(done)
    wait_for(second_batch)
    start_s = time.monotonic()
    done.close()
    assert time.monotonic() - start_s < 2


@pytest.mark.parametrize("mode", MODES)
def test_draining_finishes_the_batch_in_flight_and_launches_no_other(mode: str) -> None:
    stop = threading.Event()
    model = FakeModel(hook=lambda stage, call: stop.set() if (stage, call) == ("velocity", 6) else None)
    done = list(run(batches(30), model, mode=mode, draining=stop.is_set))
    assert [batch.batch.plan.index for batch in done] == [0, 1]
    assert model.calls["velocity"] == 8
    assert_each_id_has_its_own_picture(done)


def test_draining_does_not_wait_for_a_source_that_fills_the_window() -> None:
    stop, drained = threading.Event(), threading.Event()

    def source() -> Iterator[Batch]:
        yield from batches(1)
        wait_for(drained)

    model = FakeModel(hook=lambda stage, call: stop.set() if stage == "decode" else None)
    done = run(source(), model, draining=stop.is_set)
    assert next(done).num_ok == 3
    drained.set()
    assert list(done) == []


@pytest.mark.parametrize("mode", MODES)
def test_no_batches_give_no_results(mode: str) -> None:
    assert list(run([], mode=mode)) == []


def test_a_channel_hands_out_what_it_has_when_closed_and_nothing_when_aborted() -> None:
    channel: Channel[int] = Channel(2)
    channel.put(1)
    channel.close()
    assert list(channel) == [1]
    for end in (Channel.close, Channel.abort):
        channel = Channel(1)
        channel.put(1)
        threading.Timer(0.05, end, [channel]).start()
        with pytest.raises(Stopped):
            channel.put(2)
    with pytest.raises(Stopped):
        channel.get()


def test_br19_500_batches_of_mixed_steps_on_one_thread_a_stage() -> None:
    few, many = Bucket(16, 16, 4), Bucket(16, 16, 28)
    source = [
        as_batch(index, [request(f"m{index}", bucket=bucket)], bucket=bucket)
        for index, bucket in zip(range(500), itertools.cycle([few, many]), strict=False)
    ]
    model = FakeModel()
    done = list(run(source, model, image_format="jpeg"))
    assert [batch.batch.plan.index for batch in done] == list(range(500))
    assert all(batch.num_ok == 1 for batch in done)
    assert model.calls["velocity"] == 250 * (4 + 28)
    launching = model.threads["encode"] | model.threads["velocity"] | model.threads["decode"]
    assert len(launching) == 1  # BR-20: what captured a CUDA graph is what replays it


# --- failures of rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_br16_br13_a_non_finite_row_fails_alone_with_stage_and_dtype(mode: str) -> None:
    model = FakeModel(nan_prompts=["bad words"], nan_latents=[11, 14], nan_pixels=[12])
    rows = [
        request("fine"),
        request("embeds", prompt="bad words", seed=14),  # its latents break too: the earliest stage is named
        request("latents", seed=11),
        request("pixels", seed=12),
    ]
    done = list(run([as_batch(0, rows), *batches(1)], model, mode=mode))
    expected = {"embeds": "encode", "latents": "denoise", "pixels": "decode"}
    assert failures(done) == {name: (stage, "non_finite") for name, stage in expected.items()}
    assert "float32" in done[0].results[1].failure.message
    assert (done[0].num_ok, done[0].num_failed) == (1, 3)
    assert_each_id_has_its_own_picture(done)


def test_br13_a_non_finite_negative_prompt_fails_its_row() -> None:
    bucket = Bucket(16, 16, 2, True)
    rows = [request(name, bucket=bucket, negative_prompt=name) for name in ("ugly", "fine")]
    done = list(run([as_batch(0, rows, bucket=bucket)], FakeModel(nan_prompts=["ugly"])))
    assert failures(done) == {"ugly": ("encode", "non_finite")}


def test_br16_a_black_picture_is_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    black = torch.full((3, 3, 16, 24), -1.0)
    monkeypatch.setattr(FakeModel, "decode", lambda self, latents, bucket: black)
    done = list(run(batches(1)))
    assert not failures(done) and all(pixels_of(image).max() == 0 for image in images(done).values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [1, -1])
def test_br21_more_or_fewer_images_than_rows_end_the_run_before_anything_is_yielded(mode: str, extra: int) -> None:
    done = run(batches(3), FakeModel(extra_images=extra), mode=mode)
    with pytest.raises(ValueError, match="for 3 rows"):
        next(done)


@pytest.mark.parametrize("mode", MODES)
def test_br22_out_of_memory_halves_the_launch_and_remembers(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel(max_rows=2, hook=lambda stage, call: no_exception_is_alive())
    done = list(run([*batches(2, rows=7), *batches(1, rows=2, bucket=Bucket(8, 8, 1))], model, mode=mode))
    assert model.rows == [1] * 2 * 7 * SMALL.num_inference_steps + [2]  # 7 -> 3 -> 1, and other buckets as before
    assert [batch.times.out_of_memory_splits for batch in done] == [2, 0, 0]
    assert not failures(done)
    assert_each_id_has_its_own_picture(done)
    assert "out of memory with 7 images; bucket 16x24-4 goes on with 3 a launch" in caplog.text


def no_exception_is_alive() -> None:
    """A retry inside `except` would fail again: the exception holds every tensor."""
    assert sys.exc_info()[0] is None


def test_br22_split_launches_are_padded_to_one_size() -> None:
    model = FakeModel(max_rows=4)
    done = list(run([as_batch(0, [request(f"r{row}") for row in range(6)], size=8)], model))
    assert set(model.rows) == {4} and set(model.decoded_rows) == {4}
    assert_each_id_has_its_own_picture(done)


@pytest.mark.parametrize("mode", MODES)
def test_br22_what_does_not_fit_alone_fails_and_the_run_goes_on(mode: str) -> None:
    big = Bucket(32, 32, 2)
    model = FakeModel()

    def velocity(latents, *, bucket, **other):
        model.max_rows = 0 if bucket == big else None
        return FakeModel.velocity(model, latents, bucket=bucket, **other)

    model.velocity = velocity
    done = list(run([*batches(2, bucket=big, rows=2), as_batch(2, [request("small")])], model, mode=mode))
    assert failures(done) == {f"b{b}r{r}": ("denoise", "out_of_memory") for b in range(2) for r in range(2)}
    assert list(images(done)) == ["small"]


class SmallDecoder(FakeModel):
    """Decodes at most `max_decoded` images at once."""

    max_decoded = 2

    def decode(self, latents, *, bucket):
        if len(latents) > self.max_decoded:
            no_exception_is_alive()
            raise torch.OutOfMemoryError(f"fake: {len(latents)} images do not fit")
        return super().decode(latents, bucket=bucket)


@pytest.mark.parametrize("mode", MODES)
def test_br22_a_decode_that_does_not_fit_is_split_without_another_denoise(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = SmallDecoder()
    done = list(run([*batches(2, rows=8), *batches(1, rows=2, bucket=Bucket(8, 8, 1))], model, mode=mode))
    assert model.rows == [8] * 2 * SMALL.num_inference_steps + [2], "every step once, at the planned size"
    assert set(model.decoded_rows) == {2}
    assert [batch.times.out_of_memory_splits for batch in done] == [2, 0, 0], "8 -> 4 -> 2, and remembered"
    assert not failures(done)
    assert_each_id_has_its_own_picture(done)
    assert "out of memory; bucket 16x24-4 goes on with 2 images in a launch of the decoder (fake: 4" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_br22_an_image_that_cannot_be_decoded_alone_fails_at_the_decode(mode: str) -> None:
    model = SmallDecoder()
    model.max_decoded = 0
    done = list(run(batches(1, rows=2), model, mode=mode))
    assert set(failures(done).values()) == {("decode", "out_of_memory")}


def test_br22_a_text_encoder_that_does_not_fit_fails_the_rows_without_splitting() -> None:
    model = FakeModel(max_prompts=4)
    done = list(run(batches(1), model, encode_batch_size=8))
    assert set(failures(done).values()) == {("encode", "out_of_memory")}
    assert done[0].times.out_of_memory_splits == 0 and model.calls["velocity"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", [{"b0r2"}, {f"b{b}r{r}" for b in range(4) for r in range(3)}])
def test_br33_a_codec_that_raises_fails_its_rows_only(mode, broken, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compress.compress

    def refuse(pixels, asked, output):
        if asked.id in broken:
            raise OSError("encoding error 5")
        return plain(pixels, asked, output)

    monkeypatch.setattr(compress, "compress", refuse)
    done = list(run(batches(4), mode=mode))
    assert failures(done) == dict.fromkeys(broken, ("compress", "codec_error"))
    assert len(images(done)) == 12 - len(broken)
    assert_each_id_has_its_own_picture(done)


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_br14_prompts_are_encoded_once_in_launches_of_one_size(mode: str) -> None:
    model = FakeModel()
    bucket = Bucket(16, 16, 1, True)
    source = [
        as_batch(i, [request(f"b{i}r{r}", bucket=bucket, prompt=f"p{r}") for r in range(3)], bucket=bucket)
        for i in range(6)
    ]
    done = list(run(source, model, mode=mode, encode_batch_size=4))
    assert len(model.encoded) == 4 * model.calls["encode"]
    assert sorted(filter(None, model.encoded)) == ["p0", "p1", "p2"]
    assert_each_id_has_its_own_picture(done)


def test_free_places_of_an_encoder_launch_go_to_the_batches_that_follow() -> None:
    model = FakeModel()
    first, second, third = (tokenize(model, batch) for batch in batches(3, rows=3))
    encoder = PromptEncoder(model, Streams(), launch_size=4, capacity=64)
    encoder.prepare(first, [second, third])
    assert model.encoded == [*first.prompts, second.prompts[0]]
    encoder.prepare(second, [third])
    assert model.encoded[4:] == [*second.prompts[1:], *third.prompts[:2]]
    encoder.prepare(third, [])
    assert model.encoded[8:] == [third.prompts[2], "", "", ""]


def test_embeddings_that_the_window_needs_outlive_the_cache_size() -> None:
    model = FakeModel()
    first, second, third = (tokenize(model, batch) for batch in batches(3, rows=3))
    encoder = PromptEncoder(model, Streams(), launch_size=3, capacity=0)
    encoder.prepare(first, [second, first])
    encoder.prepare(second, [first])
    encoder.prepare(first, [])
    assert model.calls["encode"] == 2
    encoder.prepare(third, [])
    encoder.prepare(first, [])
    assert model.calls["encode"] == 4  # nobody wanted it any more


def test_the_least_recently_wanted_prompt_leaves_the_cache() -> None:
    model = FakeModel()
    a, b, c = (tokenize(model, batch) for batch in batches(3, rows=1))
    encoder = PromptEncoder(model, Streams(), launch_size=1, capacity=2)
    for batch in (a, b, a, c, a):
        encoder.prepare(batch, [])
    assert model.encoded == [*a.prompts, *b.prompts, *c.prompts]


def test_br13_non_finite_embeddings_reach_no_neighbour() -> None:
    model = FakeModel(nan_prompts=["bad"])
    batch = tokenize(model, as_batch(0, [request("a"), request("b", prompt="bad")]))
    encoder = PromptEncoder(model, Streams(), launch_size=2, capacity=2)
    encoder.prepare(batch, [])
    embeds, finite = encoder.rows(batch.prompts)
    assert finite.tolist() == [True, False]
    assert all(tensor[0].all() and not tensor[1].any() for tensor in embeds.values())


def test_finite_rows_sees_each_kind_of_break() -> None:
    rows = torch.zeros(5, 2, 3)
    rows[1, 1, 2], rows[2, 0, 0], rows[3, 0, 1] = torch.nan, torch.inf, -torch.inf
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert transfer.finite_rows(rows.to(dtype)).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("mode", MODES)
def test_br12_truncated_marks_the_row_and_no_other(mode: str) -> None:
    rows = [request("short"), request("long", prompt="x" * (MAX_PROMPT_CHARACTERS + 1)), request("other")]
    (done,) = run([as_batch(0, rows)], mode=mode)
    assert [result.truncated for result in done.results] == [False, True, False]


# --- decode and timing ------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 64), max_rows=st.integers(1, 64))
def test_br25_decode_launches_are_few_of_one_size_and_hardly_padded(rows: int, max_rows: int) -> None:
    size = launch_size(rows, max_rows=max_rows)
    launches = -(-rows // size)
    assert size <= max_rows
    assert launches == -(-rows // max_rows)
    assert launches * size - rows < launches


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 7, 100])
def test_br25_decoding_in_parts_gives_the_same_pictures(max_rows: int) -> None:
    model = FakeModel()
    done = list(run(batches(1, rows=7), model, decode_max_pixels=max_rows * 16 * 24))
    assert len(set(model.decoded_rows)) == 1 and max(model.decoded_rows) <= max_rows
    assert_each_id_has_its_own_picture(done)


def test_pixels_are_rounded_as_diffusers_does() -> None:
    from diffusers.image_processor import VaeImageProcessor

    for dtype in (torch.float32, torch.bfloat16):
        decoded = (torch.randn(2, 3, 8, 8) * 1.2).to(dtype)
        ours = to_uint8(decoded)
        theirs = VaeImageProcessor().postprocess(decoded, output_type="pil")
        assert ours.is_contiguous()
        np.testing.assert_array_equal(ours.numpy(), np.stack([np.asarray(image) for image in theirs]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_euler_step_is_diffusers(dtype: torch.dtype) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from fluxbatch.pipeline.denoise import denoise

    bucket = Bucket(64, 64, 5)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    model = FakeModel(dtype=dtype)
    model.schedule = lambda bucket: type("S", (), {"timesteps": scheduler.timesteps, "sigmas": scheduler.sigmas})
    flow = lambda latents, step: (latents.float().sin() * scheduler.timesteps[step]).to(dtype)  # noqa: E731
    model.flow = lambda **conditions: flow
    noise = torch.randn(2, 4, 8, 8)
    arguments = {"embeds": {}, "negative_embeds": None, "guidance": torch.ones(2), "bucket": bucket}
    ours = denoise(model, noise, before_step=lambda: None, **arguments)
    theirs = model.pack(noise.to(dtype))
    for step, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(flow(theirs, step), timestep, theirs, return_dict=False)[0]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_br49_stage_times_and_waits_are_those_of_the_work(mode: str) -> None:
    model = FakeModel(hook=lambda stage, call: time.sleep(0.02) if stage == "velocity" else None)
    done = list(run([*batches(2), *batches(1, bucket=Bucket(8, 8, 1))], model, mode=mode))
    assert [batch.times.first_of_shape for batch in done] == [True, False, True]
    for batch, steps in zip(done, [4, 4, 1], strict=True):
        times = batch.times
        assert steps * 20 <= times.denoise_ms < steps * 20 + 500
        assert times.prefetch_ms > 0 and times.decode_ms > 0 and times.compress_ms > 0
        assert list(times.wait_ms) == ["prefetch->launch", "launch->transfer", "transfer->compress", "compress->commit"]
        assert all(milliseconds >= 0 for milliseconds in times.wait_ms.values())
    if mode == "double_buffered":
        assert done[1].times.wait_ms["launch->transfer"] > 20  # the copier stood idle while the batch was drawn


# --- real models and devices ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    from fluxbatch.models import load_model

    return load_model(tiny_config(), true_cfg_scale=2.0)


def tiny_config() -> ModelConfig:
    return ModelConfig(
        name="tiny", family="flux1", dtype="float32", device="cpu", guidance="embedded", negative_prompts=True,
        max_sequence_length=64, max_pixels=262144, encode_batch_size=2,
    )  # fmt: skip


def test_tiny_model_gives_a_row_the_same_bytes_in_any_company_and_mode(tiny) -> None:
    bucket = Bucket(64, 64, 4)
    prompts = ["a red circle on a blue background", "two green squares", "a yellow star", "a blue triangle"]
    rows = [request(f"t{i}", bucket=bucket, prompt=p, seed=i) for i, p in enumerate(prompts)]
    orders = {"serial": [0, 1, 2, 3], "double_buffered": [3, 0, 2, 1]}
    results = []
    for mode, order in orders.items():
        pairs = [order[:2], order[2:]] if mode == "serial" else [order[:2], order[2:3], order[3:]]
        source = [as_batch(i, [rows[row] for row in pair], bucket=bucket, size=2) for i, pair in enumerate(pairs)]
        done = run_pipeline(
            source, tiny, pipeline=PipelineConfig(mode=mode), model_cfg=tiny_config(), output=OutputConfig()
        )
        results.append(images(list(done)))
    assert len(results[0]) == 4
    assert results[0] == results[1]


class SolidModel(FakeModel):
    """Fills each image with its row's first noise on a device that is made slow. Never synchronises."""

    slow_cycles = 0

    def encode(self, tokens):
        return {"prompt_embeds": tokens["ids"].float().view(-1, 1, 2)}

    def velocity(self, latents, **_):
        return torch.zeros_like(latents)

    def decode(self, latents, *, bucket):
        if self.slow_cycles:
            torch.cuda._sleep(self.slow_cycles)
        return latents[:, 0, 0].view(-1, 1, 1, 1).expand(-1, 3, bucket.height, bucket.width) * 0.4


def solid_batches(count: int) -> Iterator[Batch]:
    bucket = Bucket(256, 256, 1)
    for index in range(count):
        rows = [request(f"s{index}r{row}", bucket=bucket, seed=index * 8 + row) for row in range(4)]
        yield as_batch(index, rows, bucket=bucket)


def raw_bytes(pixels: np.ndarray, asked: Request, output: OutputConfig) -> bytes:
    return pixels.tobytes()


def num_wrong(done: Iterator[CompressedBatch]) -> int:
    """Images that are not filled with their own row's colour, from first to last pixel."""
    wrong = 0
    for batch in done:
        for asked, result in zip(batch.batch.requests, batch.results, strict=True):
            noise = torch.randn(16, generator=torch.Generator().manual_seed(asked.seed))[0] * 0.4
            colour = ((noise / 2 + 0.5).clamp(0, 1) * 255).round().item()
            pixels = np.frombuffer(result.image or bytes(1), np.uint8)
            wrong += result.image is None or int(pixels.min() != colour or pixels.max() != colour)
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("slow_side", ["device", "codec"])
def test_br26_every_pixel_is_its_own_rows_in_1000_batches(slow_side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_codec(pixels, asked, output):
        time.sleep(0.001)
        return pixels.tobytes()

    monkeypatch.setattr(compress, "compress", raw_bytes if slow_side == "device" else slow_codec)
    model = SolidModel(device=torch.device("cuda"))
    model.slow_cycles = 2_000_000 if slow_side == "device" else 0
    done = run(solid_batches(1000), model)
    assert num_wrong(itertools.islice(done, 250)) == 0
    reserved = torch.cuda.memory_reserved()
    assert num_wrong(done) == 0
    assert torch.cuda.memory_reserved() == reserved  # BR-22: levels off


@pytest.mark.gpu
@pytest.mark.parametrize("guard", ["Slot.wait", "Streams.join"])
def test_br26_without_either_guard_the_race_is_seen(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "compress", raw_bytes)
    monkeypatch.setattr(
        "fluxbatch.pipeline.timing._cuda_span", lambda: lambda: lambda: 0.0
    )  # its events have not passed
    if guard == "Slot.wait":
        monkeypatch.setattr(Slot, "wait", lambda self: None)
    else:
        monkeypatch.setattr(Streams, "join", lambda *args, **kwargs: None)
    model = SolidModel(device=torch.device("cuda"))
    model.slow_cycles = 20_000_000
    assert num_wrong(run(solid_batches(50), model)) > 0


@pytest.mark.gpu
def test_nothing_in_the_launch_path_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "compress", raw_bytes)
    model = SolidModel(device=torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert num_wrong(run(solid_batches(20), model)) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_a_gpu_both_modes_give_equal_bytes_and_event_times() -> None:
    done = {mode: list(run(MIXED, FakeModel(device=torch.device("cuda")), mode=mode)) for mode in MODES}
    assert [batch.results for batch in done["serial"]] == [batch.results for batch in done["double_buffered"]]
    assert all(b.times.denoise_ms > 0 and b.times.decode_ms > 0 for batches in done.values() for b in batches)
    for batch in done["serial"]:
        for asked, result in zip(batch.batch.requests, batch.results, strict=True):
            off = pixels_of(result.image).astype(int) - expected_pixels(asked, batch.batch.bucket)
            assert np.abs(off).max() <= 1
