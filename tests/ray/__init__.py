"""The Ray hook on real clusters."""
