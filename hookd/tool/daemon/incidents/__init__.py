"""Incidents: stored, written to a log, sent to receivers."""
