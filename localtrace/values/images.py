"""Pillow's images, without importing Pillow: that an image exists proves that it is loaded."""

from __future__ import annotations

import sys
from typing import Any

from localtrace.values.kinds import bases_of, is_loaded_kind, own_fields, package_of

_MAX_BYTES = 64 * 2**20
"""Most pixels that are copied, in bytes: the copy is made on the rollout path."""
_BAND_BYTES = {"I": 4, "F": 4}
"""Bytes per band of modes where that is not 1; modes that begin with `I;16` have 2."""


def is_image(value: Any) -> bool:
    """Tell whether a value is an image, or of another class of Pillow."""
    return any(package_of(base) == "PIL" for base in bases_of(type(value)))


def pixel_bytes(image: Any) -> int:
    """Return the size of an image's pixels in bytes, without touching them.

    Raises:
        KeyError: it is not an image, or has no size.
    """
    fields = own_fields(image)
    width: int
    height: int
    width, height = fields["_size"]
    mode = _mode(image)
    if mode == "1":
        return (width + 7) // 8 * height
    band_bytes = 2 if mode.startswith("I;16") else _BAND_BYTES.get(mode, 1)
    bands = sys.modules["PIL.ImageMode"].getmode(mode).bands
    return width * height * len(bands) * band_bytes


def _mode(image: Any) -> str:
    fields = own_fields(image)
    mode: str = fields["_mode"] if "_mode" in fields else fields["mode"]
    return mode


def is_copyable(image: Any) -> bool:
    """Tell whether the pixels can be copied: they are few enough and already in memory.

    Reading them from their file would disturb another thread that reads it at the same time.
    """
    fields = own_fields(image)
    in_memory = fields.get("_im", fields.get("im")) is not None
    is_real = is_loaded_kind(type(image), "PIL.Image", "Image")
    return is_real and in_memory and pixel_bytes(image) <= _MAX_BYTES


def image_fields(image: Any) -> dict[str, Any]:
    """Return mode, size and pixels, from which `PIL.Image.frombytes` makes the image again.

    An image with a palette is converted to RGBA.
    """
    kind: Any = sys.modules["PIL.Image"].Image
    plain = kind.convert(image, "RGBA") if _mode(image) in ("P", "PA") else image
    size = own_fields(plain)["_size"]
    return {"mode": _mode(plain), "size": list(size), "pixels": kind.tobytes(plain)}
