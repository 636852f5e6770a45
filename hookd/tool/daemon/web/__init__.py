"""The HTTP service over TCP: connections, access control and pages."""
