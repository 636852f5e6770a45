"""hookd in other libraries and programs: one module for each, which imports its library."""
