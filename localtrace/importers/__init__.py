"""Imports of what other tools wrote: rollout dumps and engine logs.

Each format is a module that reads files and yields `Rollout`s. Their ids and
times are derived from the files. `Intake` writes them through the usual recorder and skips what
the store already holds, so that a repeated or interrupted import adds nothing twice.
"""
