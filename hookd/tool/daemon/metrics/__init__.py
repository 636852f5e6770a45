"""The metrics that the daemon serves to Prometheus."""
