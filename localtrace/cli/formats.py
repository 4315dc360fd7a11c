"""Groups of commands that are the modules of a package: one for each format of files."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import click


def format_group(
    package: ModuleType, command_of: Callable[[str, Any], click.Command], about: str
) -> click.Group:
    """Return a group whose commands are the modules of a package, each imported when it is named.

    Args:
        command_of: makes the command of a name and its module.
        about: the help of the group.
    """
    modules = {
        module.name.replace("_", "-"): module.name for module in iter_modules(package.__path__)
    }

    class Formats(click.Group):
        def list_commands(self, context: click.Context) -> list[str]:
            return sorted(modules)

        def get_command(self, context: click.Context, name: str) -> click.Command | None:
            if name not in modules:
                return None
            return command_of(name, import_module(f"{package.__name__}.{modules[name]}"))

    return Formats(help=about)
