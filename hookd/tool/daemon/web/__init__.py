"""What is served over TCP: the port, who may read, the pages."""
