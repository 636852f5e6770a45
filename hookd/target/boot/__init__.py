"""Arrival of the agent in a process, and its departure.

In the order of an attach: `queued`, `stub`, `loader`, `bootstrap`, `lifecycle`, `assembly`, `arming`. A detach begins in
`lifecycle`.
"""
