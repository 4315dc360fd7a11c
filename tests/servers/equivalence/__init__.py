"""The same rollouts of verl, traced live by verl's own backend and replayed by the uploader."""
