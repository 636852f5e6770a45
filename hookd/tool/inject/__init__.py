"""Run code in a running interpreter of another process."""
