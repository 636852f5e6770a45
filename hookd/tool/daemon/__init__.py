"""The daemon: finds the agents' pages and serves their contents. Imports neither torch nor any target plugin."""
