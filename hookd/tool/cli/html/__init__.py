"""The report as one HTML page: no script, no network, light and dark, to be sent to a colleague or printed."""
