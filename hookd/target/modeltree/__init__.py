"""The models of the process: roots, names, parameters, and the coverage of each module."""
