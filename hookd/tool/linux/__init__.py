"""Read the kernel's facts about a process, safely."""
