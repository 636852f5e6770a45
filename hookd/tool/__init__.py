"""The operator's side: it attaches, serves and shows, and never imports torch."""
