"""What the kernel says of a process, and how to ask it safely."""
