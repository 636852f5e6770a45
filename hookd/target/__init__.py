"""The half of hookd that lives inside a training process. Imports torch, the standard library and hookd._pluggy."""
