"""How the agent comes into a process, and how it leaves."""
