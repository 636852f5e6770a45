"""What a tool asks of the agent, or changes in it."""
