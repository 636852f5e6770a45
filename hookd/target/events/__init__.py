"""Steps, phases, backward, data: what becomes an event, and how it reaches the plugins."""
