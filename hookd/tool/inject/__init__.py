"""How code is brought into a running interpreter."""
