"""The code that runs at every call of a module."""
