"""The API for plugins (hooks, events, metrics, the context), and for processes that observe themselves."""
