"""Sceneries behind the things: sky, ground, stars. Knows canvases, no rows."""

import torch
from torch import Tensor


class Canvas:
    """Coordinates of one supersampled picture and the brushes that the sceneries share."""

    def __init__(self, height: int, width: int, *, num_images: int, device: torch.device) -> None:
        self.height, self.width, self.num_images, self.device = height, width, num_images, device
        self.side = min(height, width)
        self.y = ((torch.arange(height, device=device) + 0.5) / height)[:, None]
        self.x = ((torch.arange(width, device=device) + 0.5) / width)[None]

    def color(self, red: float, green: float, blue: float) -> Tensor:
        return torch.tensor((red, green, blue), device=self.device).view(3, 1, 1)

    def fade(self, top: Tensor, bottom: Tensor, *, end: float = 1.0) -> Tensor:
        return top + (bottom - top) * (self.y / end).clamp(0, 1)

    def ground(self, picture: Tensor, color: Tensor, *, top: float) -> Tensor:
        cover = ((self.y - top) * self.height + 0.5).clamp(0, 1)
        return picture + (color - picture) * cover

    def disc(self, picture: Tensor, color: Tensor, *, x: float, y: float, radius: float) -> Tensor:
        distance = torch.hypot((self.x - x) * self.width, (self.y - y) * self.height)
        return picture + (color - picture) * (radius * self.side - distance + 0.5).clamp(0, 1)

    def dots(self, share: float) -> Tensor:
        """(num_images, 1, H, W) of 0 and 1: grains of 1/64 of the shorter side, other ones in each image."""
        cell = max(2, self.side // 64)
        grains = torch.rand(self.num_images, 1, -(-self.height // cell), -(-self.width // cell), device=self.device)
        blown_up = (grains < share).float().repeat_interleave(cell, 2).repeat_interleave(cell, 3)
        return blown_up[..., : self.height, : self.width]


def _night(c: Canvas) -> Tensor:
    sky = c.fade(c.color(0.03, 0.05, 0.20), c.color(0.12, 0.16, 0.42)) + c.dots(0.015) * (c.y < 0.6) * 0.8
    moonlit = c.disc(sky, c.color(0.97, 0.93, 0.70), x=0.86, y=0.14, radius=0.075)
    return c.ground(moonlit, c.color(0.05, 0.16, 0.12), top=0.78)


def _sunset(c: Canvas) -> Tensor:
    sky = c.fade(c.color(0.45, 0.20, 0.50), c.color(1.0, 0.55, 0.25), end=0.72)
    sun = c.disc(sky, c.color(1.0, 0.88, 0.35), x=0.5, y=0.72, radius=0.2)
    return c.ground(sun, c.color(0.24, 0.12, 0.22), top=0.74)


def _snow(c: Canvas) -> Tensor:
    sky = c.fade(c.color(0.66, 0.80, 0.93), c.color(0.84, 0.91, 0.97))
    field = c.ground(sky, c.color(0.97, 0.98, 1.0), top=0.68)
    return field + (1 - field) * c.dots(0.03)


def _meadow(c: Canvas) -> Tensor:
    return c.ground(c.fade(c.color(0.42, 0.72, 0.97), c.color(0.75, 0.90, 1.0)), c.color(0.36, 0.72, 0.25), top=0.66)


def _beach(c: Canvas) -> Tensor:
    sea = c.ground(c.color(0.55, 0.83, 0.98), c.color(0.10, 0.50, 0.78), top=0.42)
    return c.ground(sea, c.color(0.95, 0.85, 0.60), top=0.66)


def _desert(c: Canvas) -> Tensor:
    return c.ground(c.fade(c.color(0.98, 0.90, 0.66), c.color(0.99, 0.80, 0.50)), c.color(0.85, 0.58, 0.28), top=0.66)


def _underwater(c: Canvas) -> Tensor:
    water = c.fade(c.color(0.10, 0.62, 0.85), c.color(0.02, 0.22, 0.50))
    return water + (c.color(0.75, 0.92, 1.0) - water) * c.dots(0.012) * 0.7


def _space(c: Canvas) -> Tensor:
    return c.color(0.02, 0.02, 0.06) + c.dots(0.025) * 0.85


PAINTERS = {
    "night": _night,
    "sunset": _sunset,
    "snow": _snow,
    "meadow": _meadow,
    "beach": _beach,
    "desert": _desert,
    "underwater": _underwater,
    "space": _space,
}
