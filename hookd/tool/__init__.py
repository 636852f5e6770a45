"""The operator's side: attaches to targets, serves and shows their numbers. Never imports torch."""
