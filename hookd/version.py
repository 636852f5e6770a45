"""The version of hookd, readable without package metadata, which a payload does not have."""

__version__ = "0.1.0"
