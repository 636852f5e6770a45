"""Daemon plugins: the parts of plugins that run in the daemon."""
