"""The ranks of a run side by side: which are slow and in what, which lag behind, whose replica has drifted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import dashboard, filled, of_run, with_incidents
from panels import GREEN, ORANGE, RANK, RANKS, RED, Query, a_step, cells, density, grid, lines, rate, states

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from panels import Panel

_PHASE = "hookd_timing_phase_seconds_total"
_ALL = 'run="$run"'
"""Medians are over all ranks, whichever are shown."""
_MOST = 64
"""Ranks that have a row in the heat map."""
PHASES = {
    "data": "Waiting for a DataLoader of torch.",
    "forward": "Calls of the model that a backward follows.",
    "backward": "The gradients. Collectives that begin in it take time from it as well.",
    "collectives": "The end of the backward, when a rank waits for the others: a quick one waits longer.",
    "optimizer": "The step of the optimizer.",
    "other": "What is none of these: logging, checkpoints, data that no DataLoader gives.",
    "inference": "Calls that no backward follows (a validation, a rollout), and the time between them, not part of a step.",
}


def _own(matchers: str) -> str:
    """Return the seconds of a step in which a rank does not wait for others, as in rules/stragglers.rules.yml."""
    seconds = rate(_PHASE, matchers + ', phase!~"backward|collectives|inference"')
    return f"sum by (rank) ({seconds}) / on (rank) (sum by (rank) ({rate('hookd_steps_total', matchers)}) > 0)"


def _median() -> str:
    return f"scalar(quantile(0.5, {_own(_ALL)}))"


def _score(matchers: str) -> str:
    return f"{_own(matchers)} / {_median()}"


def _slowest() -> str:
    """Return the score of the ranks that are slowest over the whole time shown, in the order of their numbers.

    `topk` alone has other ranks at each moment: a panel would show all that are among them once. Prometheus sorts series by their
    labels, as text: `order` is the rank with leading zeros.
    """
    slowest = f"topk({_MOST}, avg_over_time(({_score(RANKS)})[$__range:$__interval] @ end()))"
    padded = f'label_replace({_score(RANKS)} and on (rank) {slowest}, "order", "0000$1", "rank", "(.*)")'
    return f'label_replace({padded}, "order", "$1", "order", "0*(.{{5,}})")'


def ranks() -> Dashboard:
    """Make the dashboard."""
    text = "The ranks of a run side by side, on all nodes: own time, stragglers, lag, drift."
    made = with_incidents(dashboard("hookd-ranks", "Ranks", text, of_run()))
    sections = {
        "Who is slow": _slow(),
        "In what": _phases(),
        "Who lags behind": _behind(),
        "Who has drifted (plugin drift)": _drifted(),
    }
    return filled(made, sections)


def _slow() -> list[Panel]:
    return [
        cells("Slow ranks", f"A row for each rank, the {_MOST} slowest of the time shown if there are more; its own time over the median of"
              " the run: green as the median, red from twice as long on (plugin timing).",
              Query(_slowest(), RANK), least=1, most=2),
        density("How many ranks are slow", "Ranks by own time over the median, rounded to 0.1; the last row has all from 3 on."
                " A healthy run is one narrow band at 1 (plugin timing).",
                Query(f'count_values("score", round(clamp_max({_score(_ALL)}, 3), 0.1))', "{{score}}")),
        lines("Own time", "Seconds of a step outside of the backward, in which ranks wait for each other (plugin timing).", "s",
              Query(_own(RANKS), RANK)),
        lines("Own time over the median", "Of all ranks of the run, on all nodes: 1.5 is half as much again.", "none",
              Query(_score(RANKS), RANK), red=1.5),
        lines("Straggler score", "As each daemon has it for the ranks of its node; that of a healthy rank may reach 1.5.", "none",
              Query(f"max by (rank) (hookd_straggler_score{{{RANKS}}})", RANK)),
        states("Stragglers", "Ranks that the others of the node wait for, step by step: this is the verdict.",
               Query(f"max by (rank) (hookd_straggler{{{RANKS}}})", RANK),
               words={"0": ("in time", GREEN), "1": ("straggler", RED)}),
        lines("Lateness", "Seconds of a step that a rank needs more than the median, outside of waiting.", "s",
              Query(f"{_own(RANKS)} - {_median()}", RANK)),
        grid("A step now", "Seconds of a step by rank and phase.", "s", a_step(_PHASE, RANKS, "rank, phase"),
             row="rank", column="phase"),
    ]  # fmt: skip


def _phases() -> list[Panel]:
    made = [lines(f"In {phase}", f"Seconds of a step by rank. {text}", "s",
                  Query(a_step(_PHASE, f'{RANKS}, phase="{phase}"', "rank"), RANK), width=8)
            for phase, text in PHASES.items()]  # fmt: skip
    cores = Query(f"sum by (rank) ({rate('hookd_target_cpu_seconds_total', RANKS)})", RANK)
    return [*made, lines("Cores", "CPU time a second of each rank's process, all threads.", "short", cores, width=8)]


def _behind() -> list[Panel]:
    issued = f"max by (rank, group) (hookd_collectives_total{{{RANKS}}})"
    furthest = f"max by (group) (hookd_collectives_total{{{_ALL}}})"
    return [
        lines("Collectives behind", "How many a rank has issued less than the one that is furthest. Scrapes are not at one moment:"
              " what stays behind, and grows, is stuck.", "short",
              Query(f"{furthest} - on (group) group_right () {issued}", RANK + " of {{group}}")),
        lines("Steps a second", "Equal for ranks that wait for each other.", "cps",
              Query(f"sum by (rank) ({rate('hookd_steps_total', RANKS)})", RANK)),
        lines("Silence", "Time since a rank last called a module.", "s",
              Query(f"max by (rank) (time() - hookd_heartbeat_timestamp_seconds{{{RANKS}}})", RANK)),
        states("Hangs", "A rank that stands is waited for by those that wait.",
               Query(f"max by (rank, role) (hookd_hang{{{RANKS}}})", RANK + " {{role}}"),
               words={"0": ("fine", GREEN), "1": ("hangs", RED)}),
    ]  # fmt: skip


def _drifted() -> list[Panel]:
    return [
        states("Replicas", "Whether a replica differs from most others on its node (plugin drift).",
               Query(f"max by (rank) (hookd_drift_diverged{{{RANKS}}})", RANK),
               words={"0": ("alike", GREEN), "1": ("differs", ORANGE)}),
        lines("Compared at step", "The last step of which a rank has published checksums, as it counts (plugin drift).", "none",
              Query(f"max by (rank) (hookd_drift_step{{{RANKS}}})", RANK)),
    ]  # fmt: skip
