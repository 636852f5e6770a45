"""`hookd plugin check`: what can be said of a plugin from its source. Tool side: nothing is imported, least of all torch."""
