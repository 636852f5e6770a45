"""What runs at every call of a module."""
