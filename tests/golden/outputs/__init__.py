"""The golden rollouts through every command that prints them, exporter, target and page, as files.

`rollouts.py` has the rollouts and `store.py` records them, the same everywhere: ids, clocks and
machine are made up. `commands.py`, `exports.py`, `uploads.py` and `pages.py` make the outputs, and
`expected/` is what they were. The outputs are reduced to what a change of the code could break:
JSON and decoded protobuf indented, pages as visible text with its links, no digests, versions,
ports or sizes.

A change of the expected files is a change of what users and other programs get. It is reviewed line
by line: each line must be meant. `python -m tests.golden.outputs` prints how the outputs differ,
`--write` makes them the expected ones, and names of outputs, or beginnings of names, choose some.
"""
