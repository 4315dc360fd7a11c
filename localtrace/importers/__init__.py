"""Bring in what other tools wrote: rollout dumps, engine logs, metrics.

A format is a module that reads files and yields what is to be recorded: `Rollout`s or `Logged`
metrics, under ids and times that follow from what was read. `Intake` writes them through the usual
recorder and leaves out what the store holds, so that an import that was repeated or cut off adds
nothing twice and loses nothing.
"""
