"""The models of the process: roots, names, parameters, and what is seen of each module."""
