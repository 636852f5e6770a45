"""Detection of events (steps, phases, backward, data) and their dispatch to the plugins."""
