"""Pixels to file bytes: lossless where promised, the same bytes every time, settings that image tools read."""

import io
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.ExifTags import IFD, Base

from fluxbatch.config import IMAGE_FORMATS, OutputConfig
from fluxbatch.pipeline.compress import compress, parameters
from fluxbatch.records import Request

COMMENT_PREFIX = b"UNICODE\0"


def picture(height: int = 48, width: int = 80) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    smooth = np.stack([rows * 3, columns * 2, rows + columns], axis=-1)
    return (smooth + np.random.default_rng(0).integers(0, 5, smooth.shape)).astype(np.uint8)


def request(**fields) -> Request:
    defaults = {
        "id": "a", "prompt": "a red circle", "negative_prompt": None, "height": 48, "width": 80,
        "num_inference_steps": 20, "guidance_scale": 3.5, "seed": -7,
    }  # fmt: skip
    return Request(**defaults | fields)


def output(image_format: str, **fields) -> OutputConfig:
    return OutputConfig(image_format=image_format, **fields)


def opened(image: bytes) -> Image.Image:
    return Image.open(io.BytesIO(image))


def comment(image: bytes) -> str:
    raw = opened(image).getexif().get_ifd(IFD.Exif)[Base.UserComment]
    assert raw.startswith(COMMENT_PREFIX)
    return raw.removeprefix(COMMENT_PREFIX).decode("utf-16-be")


@pytest.mark.parametrize("level", range(10))
def test_png_is_lossless_at_each_level(level: int) -> None:
    pixels = picture()
    np.testing.assert_array_equal(
        np.asarray(opened(compress(pixels, request(), output("png", png_level=level)))), pixels
    )


@pytest.mark.parametrize("image_format", IMAGE_FORMATS)
def test_the_file_is_of_its_format_and_close_to_the_pixels(image_format: str) -> None:
    image = opened(compress(picture(), request(), output(image_format, quality=95)))
    assert image.format == image_format.upper()
    assert image.size == (80, 48) and image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - picture()).mean() < 5


@pytest.mark.parametrize("image_format", IMAGE_FORMATS)
def test_bytes_are_the_same_every_time_and_on_every_thread(image_format: str) -> None:
    found: set[bytes] = set()

    def work() -> None:
        found.update(compress(picture(), request(prompt="猫"), output(image_format)) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert len(found) == 1


def test_parameters_read_as_the_web_ui_writes_them() -> None:
    row = request(negative_prompt="blurry\nugly")
    assert parameters(row) == (
        "a red circle\nNegative prompt: blurry\nugly\nSteps: 20, Sampler: Euler, CFG scale: 3.5, Seed: -7, Size: 80x48"
    )
    assert "Negative prompt" not in parameters(request())


PROMPTS = ["a red circle", "größer, naïve", "一只猫 🐈", 'quotes " \\ {json} ${x}\nnew line', "nul\0inside"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("image_format", IMAGE_FORMATS)
def test_settings_come_back_out_of_the_image(image_format: str, prompt: str) -> None:
    row = request(prompt=prompt)
    image = compress(picture(), row, output(image_format))
    text = opened(image).text["parameters"] if image_format == "png" else comment(image)
    assert text == parameters(row)


@pytest.mark.parametrize("image_format", IMAGE_FORMATS)
def test_no_settings_inside_when_not_asked_for(image_format: str) -> None:
    image = opened(compress(picture(), request(), output(image_format, embed_parameters=False)))
    assert not image.getexif() and not getattr(image, "text", {})


@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
@pytest.mark.parametrize("character", ["x", "猫", "🐈"])
def test_a_prompt_longer_than_exif_is_cut_between_characters_and_the_image_is_written(image_format, character) -> None:
    text = comment(compress(picture(), request(prompt="-" + character * 60_000), output(image_format)))
    assert len(text) > 15_000
    assert text == "-" + character * (len(text) - 1)


@given(
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=300),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(IMAGE_FORMATS),
)
def test_any_prompt_and_seed_can_be_written(prompt: str, seed: int, image_format: str) -> None:
    image = compress(picture(16, 16), request(prompt=prompt, seed=seed), output(image_format))
    assert np.asarray(opened(image)).shape == (16, 16, 3)


def test_br33_a_side_that_webp_cannot_hold_raises() -> None:
    with pytest.raises(ValueError, match="encoding error"):
        compress(np.zeros((1, 16_400, 3), np.uint8), request(), output("webp"))


def test_png_level_1_is_as_small_as_level_6_on_pictures() -> None:
    pixels = picture(256, 256)
    sizes = {level: len(compress(pixels, request(), output("png", png_level=level))) for level in (0, 1, 6)}
    assert sizes[1] <= sizes[6] * 1.02 < sizes[0]
