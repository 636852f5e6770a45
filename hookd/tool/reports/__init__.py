"""Reports on a target, as data and as text.

This package runs in the tool and in targets, so it needs only the standard library.
"""
