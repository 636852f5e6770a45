"""Requests of tools to the agent: queries, changes, traces and evaluations."""
