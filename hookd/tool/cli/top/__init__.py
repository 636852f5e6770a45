"""`hookd top`: a live view of all targets, and of the modules of one.

It reads pages and /proc, and sends no request to a target.
"""
