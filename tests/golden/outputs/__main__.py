"""Print how the outputs differ from the expected ones, or make them the expected ones."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.golden.outputs.comparing import EXPECTED, NEEDED, OUTPUTS, difference, expected_path
from tests.golden.outputs.golden import make_golden


def main() -> int:
    """Return 1 where an output differs and is not written."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.outputs", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of outputs, or beginnings of names")
    parser.add_argument("--write", action="store_true", help="make the outputs the expected ones")
    arguments = parser.parse_args()
    names = [one for one in OUTPUTS if one.startswith(tuple(arguments.names or [""]))]
    for name in [one for one in names if one in NEEDED and find_spec(NEEDED[one]) is None]:
        print(f"{name} needs {NEEDED[name]}: run it with .venv-formats/bin/python")
        names.remove(name)
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        golden = make_golden(Path(folder))
        for name in names:
            output = OUTPUTS[name](golden)
            if text := difference(name, output):
                differing += 1
                print(text)
            if arguments.write:
                expected_path(name).parent.mkdir(parents=True, exist_ok=True)
                expected_path(name).write_text(output)
    if arguments.write and not arguments.names:
        for path in set(EXPECTED.rglob("*.txt")) - set(map(expected_path, OUTPUTS)):
            path.unlink()
    print(f"{differing} of {len(names)} outputs {'changed' if arguments.write else 'differ'}")
    return 1 if differing and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
