"""The daemon's web pages: rendered on the server, read-only, one module per page. The HTML report shares their parts.

Functions render a page from the daemon's data and return `html.Markup`; `routes` serves them. All strings that come from
a target (names of runs and modules, command lines, messages) are escaped by `text.text`, by way of `html.tag`.
"""
