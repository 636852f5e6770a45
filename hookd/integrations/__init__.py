"""hookd in the programs of others: one module for each, which imports its library. Runs in the target."""
