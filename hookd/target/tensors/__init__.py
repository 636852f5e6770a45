"""Numbers of tensors, and reading them without a trace."""
