"""`hookd.start()` and `hookd.stop()`: hookd in code, for a process that wants to be observed. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT = ("nan", "timing", "activations")


def start(
    plugins: Iterable[str | tuple[str, Mapping[str, object]]] = DEFAULT,
    *,
    run: str | None = None,
    rank: int | None = None,
    budget: float = 0.01,
) -> None:
    """Start observing this process; any number of daemons may then read it, and `stop` ends it.

    Args:
        plugins: names, or pairs of a name and its options; naming a plugin that changes training enables it.
        run: the label `run`; found from the environment if None.
        rank: the label `rank`; found from the environment if None.
        budget: the share of step time that all plugins together may take.

    Raises:
        HookdError: an agent runs already, torch is not imported, or a plugin is unknown or refuses its options.
    """
    from hookd.agent import bootstrap

    specs: list[dict[str, Any]] = []
    for plugin in plugins:
        name, options = (plugin, {}) if isinstance(plugin, str) else plugin
        texts = {k: str(v) for k, v in dict(options).items()}
        specs.append({"name": name, "options": texts, "by_name": plugins is not DEFAULT})
    config = {"method": "start", "plugins": specs, "lease_s": None, "run": run, "rank": rank, "budget": budget}
    bootstrap.start(config)


def stop(timeout_s: float = 10.0) -> dict[str, Any]:
    """Detach: restore everything and forget.

    Returns:
        `restored` (identity, pass-through or pending) and `residue`, what could not be undone.

    Raises:
        HookdError: nothing was started.
    """
    from hookd.agent import bootstrap

    return bootstrap.stop(timeout_s)
