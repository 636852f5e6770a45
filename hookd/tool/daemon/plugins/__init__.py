"""The parts of plugins that run in the daemon."""
