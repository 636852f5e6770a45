"""Conclusions from several targets, or from one over time: hangs, stragglers, silence, drift."""
