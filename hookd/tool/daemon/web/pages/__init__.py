"""The web pages of the daemon: made by the server, read-only, one file each. What they share, the HTML report has too.

A page is made by functions that take what the daemon knows and give `html.Markup`; `routes` serves them. Everything that
a target says (names of runs and modules, command lines, messages) goes through `text.text`, by way of `html.tag`.
"""
