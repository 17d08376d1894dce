"""Makes sprites.npz from the artwork of npm @iconify-json/fluent-emoji-flat (MIT, see NOTICE). Run by a maintainer:

npm pack @iconify-json/fluent-emoji-flat@1.2.6 && tar xf iconify-json-*.tgz && pip install resvg-py==0.5.0
python -m fluxbatch.tiny.make_sprites package/icons.json
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fluxbatch.tiny.words import SPRITES

SIDE, MARGIN = 128, 2  # pixels
CREDIT = "Fluent Emoji Flat (c) Microsoft Corporation, MIT licence; npm @iconify-json/fluent-emoji-flat"
# icon -> the words for it, the name first
ICONS = {
    "cat-face": "cat|kitten",
    "dog-face": "dog|puppy",
    "fox": "fox",
    "lion": "lion",
    "panda": "panda",
    "bear": "bear",
    "rabbit-face": "rabbit|bunny",
    "cow-face": "cow",
    "pig-face": "pig",
    "frog": "frog",
    "monkey-face": "monkey",
    "penguin": "penguin",
    "owl": "owl",
    "duck": "duck",
    "bird": "bird",
    "tropical-fish": "fish",
    "dolphin": "dolphin",
    "spouting-whale": "whale",
    "octopus": "octopus",
    "crab": "crab",
    "turtle": "turtle",
    "butterfly": "butterfly",
    "lady-beetle": "ladybug",
    "honeybee": "bee",
    "unicorn": "unicorn",
    "elephant": "elephant",
    "snail": "snail",
    "t-rex": "dinosaur",
    "red-apple": "apple",
    "banana": "banana",
    "grapes": "grapes",
    "watermelon": "watermelon",
    "strawberry": "strawberry",
    "lemon": "lemon",
    "tangerine": "tangerine",
    "pineapple": "pineapple",
    "carrot": "carrot",
    "mushroom": "mushroom",
    "pizza": "pizza",
    "hamburger": "burger|hamburger",
    "doughnut": "donut|doughnut",
    "birthday-cake": "cake",
    "soft-ice-cream": "ice cream",
    "deciduous-tree": "tree",
    "evergreen-tree": "pine tree",
    "palm-tree": "palm tree",
    "cactus": "cactus",
    "tulip": "tulip",
    "sunflower": "sunflower",
    "rose": "rose",
    "maple-leaf": "leaf",
    "automobile": "car",
    "bus": "bus",
    "bicycle": "bicycle|bike",
    "locomotive": "train",
    "airplane": "airplane|plane",
    "rocket": "rocket",
    "flying-saucer": "ufo",
    "sailboat": "boat|sailboat",
    "tractor": "tractor",
    "house": "house",
    "castle": "castle",
    "tent": "tent",
    "snowman": "snowman",
    "umbrella": "umbrella",
    "fire": "fire|flame",
    "balloon": "balloon",
    "wrapped-gift": "gift|present",
    "crown": "crown",
    "key": "key",
    "light-bulb": "light bulb",
    "guitar": "guitar",
    "soccer-ball": "soccer ball|football",
    "trophy": "trophy",
    "gem-stone": "gem|gemstone",
    "robot": "robot",
    "ghost": "ghost",
    "jack-o-lantern": "pumpkin",
    "teddy-bear": "teddy bear",
    "alarm-clock": "clock|alarm clock",
}


def draw(icons: dict, name: str) -> np.ndarray:
    """One icon as straight RGBA (SIDE, SIDE, 4) uint8, cropped to what it covers and centred."""
    import resvg_py

    icon = icons["icons"].get(name) or icons["icons"][icons["aliases"][name]["parent"]]
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = f'<svg {spaces} width="512" height="512" viewBox="0 0 32 32">{icon["body"]}</svg>'
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=512, height=512))
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    image = image.crop(image.getchannel("A").point(lambda alpha: 255 if alpha > 8 else 0).getbbox())
    square = Image.new("RGBA", (max(image.size),) * 2, (0, 0, 0, 0))
    square.paste(image, ((square.width - image.width) // 2, (square.height - image.height) // 2))
    return shrink(np.asarray(square, np.float32) / 255)


def shrink(rgba: np.ndarray) -> np.ndarray:
    """Scaled with premultiplied alpha, so that invisible pixels do not bleed into the edges."""
    room = SIDE - 2 * MARGIN
    premultiplied = np.concatenate([rgba[..., :3] * rgba[..., 3:], rgba[..., 3:]], -1)
    channels = [
        np.asarray(Image.fromarray(premultiplied[..., c]).resize((room, room), Image.Resampling.LANCZOS))
        for c in range(4)
    ]
    small = np.clip(np.stack(channels, -1), 0, 1)
    alpha = small[..., 3:]
    small[..., :3] = np.where(alpha > 1 / 512, small[..., :3] / np.maximum(alpha, 1 / 512), 0)
    sprite = np.zeros((SIDE, SIDE, 4), np.uint8)
    sprite[MARGIN:-MARGIN, MARGIN:-MARGIN] = (np.clip(small, 0, 1) * 255 + 0.5).astype(np.uint8)
    sprite[sprite[..., 3] == 0] = 0
    return sprite


def main(source: Path) -> None:
    icons = json.loads(source.read_text())
    rgba = np.stack([draw(icons, name) for name in ICONS])
    np.savez_compressed(SPRITES, rgba=rgba, names=np.array(list(ICONS.values())), source=np.array(CREDIT))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
