"""What Prometheus is served."""
