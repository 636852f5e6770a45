"""The targets of a daemon, from discovery to their end."""
