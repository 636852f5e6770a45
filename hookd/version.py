"""The version of hookd, readable without package metadata: a payload has none."""

__version__ = "0.1.0"
