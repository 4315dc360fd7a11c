"""Hand on: chosen trajectories as files that other tools read.

A format is a module that turns trajectories into bytes. `Source` reads them, whole and with what
must not leave taken out, as the uploader does; `new_file` puts the result in its place at once.
"""
