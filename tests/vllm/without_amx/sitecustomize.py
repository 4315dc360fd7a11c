"""Keeps vLLM's engine processes from using AMX, which some virtual machines promise and trap."""

from __future__ import annotations

from wrapt import register_post_import_hook


def _say_no(module: object) -> None:
    module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]


register_post_import_hook(_say_no, "torch.cpu")
