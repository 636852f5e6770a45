"""Where attaching is impossible, these tests are skipped with the reason, as those in `tests/e2e` are."""

from tests.e2e.conftest import attachable

__all__ = ["attachable"]
