"""The report as one HTML page, light and dark, to send or print; it uses no script and no network."""
