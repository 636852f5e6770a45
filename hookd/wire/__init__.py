"""Code that the target and the tools share: the page, labels, names. It needs only the standard library."""
