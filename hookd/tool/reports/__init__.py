"""Reports of a target, put into words; needs the standard library alone."""
