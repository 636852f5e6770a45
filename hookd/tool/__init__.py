"""The tool: attaches to targets, serves and shows their numbers. Never imports torch.

Each package imports only from those after it: `cli` has the commands, `daemon` is `hookd serve`, `attach` finds, enters and
leaves targets, `inject` runs code in another process, `linux` reads facts about processes. Beside them, `reports` words a
report, `config` reads the configuration, and `check` checks a plugin's source.
"""
