"""Fingerprints of trainings: what `hookd fingerprint` writes, and what `hookd diff` compares."""
