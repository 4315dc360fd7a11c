"""Run a command of localtrace that takes killed uploads for dead after seconds.

python -m tests.servers.impatient upload …
"""

from __future__ import annotations

from localtrace.cli import main
from localtrace.uploader.targets import weave_announcements

if __name__ == "__main__":
    weave_announcements.BEAT_INTERVAL_S = 0.3
    weave_announcements.QUIET_S = 3.0
    main(prog_name="localtrace")
