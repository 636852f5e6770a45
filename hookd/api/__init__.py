"""What plugins are written against: hooks, events, metrics, the context, and how a process observes itself. On both sides."""
