"""What the target and the tools share: the page, labels, names. Needs the standard library alone."""
