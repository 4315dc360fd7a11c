"""One module per format that `localtrace import` knows; the module's name is the command's.

A module has

    PATTERN                 the names of its files in a folder; several are joined by "or"
    OPTIONS                 its own options, as parameters of click; may be missing
    read(source, **options) yields trajectories; its docstring is the command's help
    default_run_id(paths)   the run where none is given; may be missing
"""
