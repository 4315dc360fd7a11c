"""`python -m tests.synthetic FOLDER COUNT`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.synthetic import Size, write_store

if __name__ == "__main__":
    write_store(Path(sys.argv[1]), Size(int(sys.argv[2])))
