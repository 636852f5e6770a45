"""Arrival of the agent in a process, and its departure."""
