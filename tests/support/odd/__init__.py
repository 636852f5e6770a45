"""Odd trainings, which must not notice that they are observed."""

from tests.support.odd import attributes, changing, containers, optimizers, parametrized
from tests.support.odd.table import TABLE

__all__ = ["TABLE", "attributes", "changing", "containers", "optimizers", "parametrized"]
