"""The targets of a daemon, from their first sight to their end."""
