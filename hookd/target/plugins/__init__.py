"""The plugins: who listens, what each costs, and what keeps it from harming the training."""
