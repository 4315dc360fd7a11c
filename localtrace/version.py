"""The version of this package; that of the on-disk format is `schema.FORMAT_VERSION`."""

__version__ = "0.1.0"
