"""The daemon: finds the agents' pages and serves their contents. Imports neither torch nor any target plugin.

`service` runs its parts: `fleet` has the targets and copies of their pages, `watch` compares them, `incidents` stores and sends
what is reported, `plugins` calls daemon plugins, `metrics` makes the text of a scrape, and `web` serves it over TCP. `api`
answers commands on the control socket, `client` is the commands' side of that; `auto_attach` attaches by rule.
"""
