"""Names that verl's data carries for localtrace."""

TRACE_ID_KEY = "localtrace_trace_id"
"""In `AgentLoopOutput.extra_fields`, so a column of V0's batches and a part of V1's records."""
