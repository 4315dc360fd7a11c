"""One module per format that `localtrace export` knows; the module's name is the command's.

A module has

    write(source, out, **options)   writes the trajectories of a `Source` into an open file, and
                                    counts in `source.left_out` what the format does not hold
    OPTIONS                         its own options, as parameters of click; may be missing
    IS_FOLDER                       where `out` is the path of a new folder
    IS_FOR_TRAINING                 where validation rollouts are left out without --validate

or, where it holds the metrics of runs,

    write_metrics(metrics, folder)  writes them; returns lines that say what to do with `{out}`

The docstring of the function is the command's help. Heavy packages are imported inside functions,
so that `localtrace export --help` loads none of them.
"""
