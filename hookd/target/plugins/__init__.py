"""The plugins: loading, routing and calling them, their cost, and their isolation from the training."""
