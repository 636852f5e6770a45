"""The daemon: finds pages, serves what they hold. Imports neither torch nor any plugin."""
