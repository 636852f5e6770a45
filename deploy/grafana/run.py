"""One run: how fast it is, what it learns with, what went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import TO_MODULE, dashboard, filled, of_run, with_incidents
from panels import (
    BLUE,
    GREEN,
    ORANGE,
    RANK,
    RANKS,
    RED,
    Column,
    Query,
    a_step,
    labels,
    lines,
    number,
    rate,
    rows,
    states,
    step_time,
)

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from panels import Panel

_STEPS = rate("hookd_steps_total", RANKS)
_MFU = f"{rate('hookd_timing_flops_total', RANKS)} / hookd_timing_peak_flops_per_second{{{RANKS}}}"
_BUCKETS = f"sum by (le) ({rate('hookd_step_seconds_bucket', RANKS)})"
_HIDDEN = (
    "__name__",
    "job",
    "run",
    "reason",
    "method",
    "target_namespace",
    "target_container",
    "endpoint",
    "container",
)


def run() -> Dashboard:
    """Make the dashboard."""
    text = "One run: its speed, its health, its learning, and what its processes use."
    made = with_incidents(dashboard("hookd-run", "Run", text, of_run()))
    sections = {
        "Now": _now(),
        "Speed": _speed(),
        "Health": _health(),
        "Learning": _learning(),
        "Process": _process(),
        "Optimizer and clipping (plugins optimizer, gradclip)": _optimizer(),
        "Memory of the device (plugin memory)": _device_memory(),
    }
    return filled(made, sections)


def _now() -> list[Panel]:
    return [
        number("Ranks", "Processes that are attached and whose page can be read.", "short",
               f"sum(hookd_target_up{{{RANKS}}})"),
        number("Step rate", "Optimizer steps a second, the mean of the ranks.", "cps", f"avg({_STEPS})"),
        number("Step time", "Median of all ranks' steps.", "s", f"histogram_quantile(0.5, {_BUCKETS})", none="-"),
        number("Samples", "Trained on a second, by all ranks together (plugin timing).", "cps",
               f"sum({rate('hookd_timing_samples_total', RANKS)})"),
        number("MFU", "Share of the devices' peak that the model's operations use, the mean of the ranks.", "percentunit",
               f"avg({_MFU})", none="-"),
        number("Hanging", "Ranks that stand, and ranks that wait for them.", "short", f"sum(hookd_hang{{{RANKS}}})", red=1),
        number("NaN", "Places where a NaN or an infinity was born.", "short",
               f"count(hookd_nan_origin{{{RANKS}}} > 0)", red=1),
        number("Incidents", "Reported about this run since it was attached.", "short",
               f"sum(hookd_incidents_total{{{RANKS}}})", red=1),
        labels("Processes", "Which process each rank is, and where.", f"hookd_target_info{{{RANKS}}}", _HIDDEN),
    ]  # fmt: skip


_OF_INFERENCE = ', phase="inference"'


def _speed() -> list[Panel]:
    quantiles = [
        Query(f"histogram_quantile({q}, {_BUCKETS})", name)
        for q, name in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
    ]
    return [
        lines("Step time by rank", "Mean wall time of a step. Ranks that wait for each other have the same.", "s",
              Query(step_time(RANKS, "rank"), RANK)),
        lines("Step time", "Quantiles of all ranks' steps, as exact as the buckets of hookd_step_seconds.", "s", *quantiles),
        lines("Phases of a step", "Where the training thread spends a step, the mean of the ranks (plugin timing). Ranks wait"
              " for each other in the backward.", "s",
              Query(a_step("hookd_timing_phase_seconds_total", RANKS + ', phase!="inference"', "phase"), "{{phase}}"), stacked=True),
        lines("Inference", "Share of the time that goes to calls that no backward follows: a validation, a rollout (plugin"
              " timing). It is not part of a step.", "percentunit",
              Query(f"sum by (rank) ({rate('hookd_timing_phase_seconds_total', RANKS + _OF_INFERENCE)})", RANK)),
        lines("Samples", "Trained on a second, by rank (plugin timing).", "cps",
              Query(f"sum by (rank) ({rate('hookd_timing_samples_total', RANKS)})", RANK)),
        lines("Tokens", "Trained on a second, by rank, padding included, if the input is token ids (plugin timing).", "cps",
              Query(f"sum by (rank) ({rate('hookd_timing_tokens_total', RANKS)})", RANK)),
        lines("Model FLOP/s", "Operations of the model's layers a second, forward and backward (plugin timing).", "flops",
              Query(f"sum by (rank) ({rate('hookd_timing_flops_total', RANKS)})", RANK)),
        lines("MFU", "Model FLOP/s over the peak of the device: known for common GPUs, or set with timing:peak_flops.",
              "percentunit", Query(f"avg by (rank) ({_MFU})", RANK)),
    ]  # fmt: skip


def _health() -> list[Panel]:
    born = f"max by (rank, module, where, kind) (hookd_nan_origin{{{RANKS}}}) > 0"
    step = f"({born}) * 0 + on (rank) group_left () max by (rank) (hookd_nan_first_step{{{RANKS}}})"
    origin = [Column("Share", "percentunit", born), Column("First step", "none", step)]
    roles = {"0": ("fine", GREEN), "1": ("hangs", RED)}
    return [
        lines("Incidents", "Reported so far, by kind: a step up is a new one.", "short",
              Query(f"sum by (rank, kind) (hookd_incidents_total{{{RANKS}}}) > 0", "{{kind}} " + RANK)),
        lines("Silence", "Time since a rank last called a module, beside how long it may be silent there.", "s",
              Query(f"max by (rank) (time() - hookd_heartbeat_timestamp_seconds{{{RANKS}}})", RANK),
              Query(f"max by (rank) (hookd_hang_patience_seconds{{{RANKS}}})", f"patience, {RANK}")),
        states("Hangs", "A rank that stands is waited for by those that wait.",
               Query(f"max by (rank, role) (hookd_hang{{{RANKS}}})", RANK + " {{role}}"), words=roles),
        lines("NaN and infinity", "Tensors with one so far, by place (plugin nan).", "short",
              Query(f"sum by (module, where, kind) (hookd_nan_nonfinite_total{{{RANKS}}})", "{{kind}} in {{where}} of {{module}}")),
        rows("Where NaN was born", "The module, and the first step (plugin nan). Click on a module.", origin,
             links=[("module", "The module", TO_MODULE)], width=12),
        lines("Findings", "Modules that learn badly: dead, saturated, vanishing, exploding ... (plugin activations).", "short",
              Query(f"max by (module, kind, rank) (hookd_activations_finding{{{RANKS}}})", "{{kind}} {{module}} " + RANK)),
        states("Training is changed", "Plugins that change the training now: clipping, skipping steps.",
               Query(f"max by (rank, plugin) (hookd_plugin_changes_training{{{RANKS}}})", "{{plugin}} " + RANK),
               words={"0": ("only looks", GREEN), "1": ("changes the training", ORANGE)}),
        states("Compiling", "While torch.compile compiles, a long step is not a hang.",
               Query(f"max by (rank) (hookd_compiling{{{RANKS}}})", RANK), words={"0": ("no", GREEN), "1": ("compiles", BLUE)}),
    ]  # fmt: skip


def _learning() -> list[Panel]:
    grown = f"sum by (backward) (deriv(hookd_activations_cumulative_loss{{{RANKS}}}[$__rate_interval]))"
    count = f"sum by (backward) ({rate('hookd_activations_losses_total', RANKS)})"
    return [
        lines("Loss", "Mean over the interval and the ranks, by backward of a step (plugin activations).", "none",
              Query(f"{grown} / ({count} > 0)", "backward {{backward}}")),
        lines("Gradient norm", "Of all gradients that the steps used, as of the last sampled step (plugin activations).", "none",
              Query(f"max by (rank) (hookd_activations_total_grad_norm{{{RANKS}}})", RANK)),
        lines("Learning rate", "By optimizer and group, as of the last sampled step (plugin learning).", "none",
              Query(f"max by (optimizer, group) (hookd_learning_rate{{{RANKS}}})", "{{optimizer}} group {{group}}")),
    ]  # fmt: skip


def _optimizer() -> list[Panel]:
    return [
        lines("Gradient norm before clipping", "Of all gradients (plugin gradclip).", "none",
              Query(f"max by (rank) (hookd_gradclip_norm{{{RANKS}}})", RANK)),
        lines("Clipping", "Smallest factor of a step: 1 where nothing was clipped (plugin gradclip).", "percentunit",
              Query(f"min by (rank) (hookd_gradclip_scale{{{RANKS}}})", RANK)),
        lines("Weight norm", "By optimizer and group (plugin optimizer).", "none",
              Query(f"max by (optimizer, group) (hookd_optimizer_weight_norm{{{RANKS}}})", "{{optimizer}} group {{group}}")),
        lines("Loss scale", "Of the GradScaler (plugin optimizer).", "none",
              Query(f"max by (rank) (hookd_optimizer_loss_scale{{{RANKS}}})", RANK)),
        lines("Skipped steps", "A second, because a GradScaler's gradients overflowed (plugin optimizer).", "cps",
              Query(f"sum by (rank) ({rate('hookd_optimizer_skipped_steps_total', RANKS)})", RANK)),
    ]  # fmt: skip


def _process() -> list[Panel]:
    return [
        lines("Resident memory", "Of each rank's process.", "bytes",
              Query(f"max by (rank) (hookd_target_resident_memory_bytes{{{RANKS}}})", RANK)),
        lines("Cores", "CPU time a second of each rank's process, all threads.", "short",
              Query(f"sum by (rank) ({rate('hookd_target_cpu_seconds_total', RANKS)})", RANK)),
        lines("Modules", "Modules of the models seen, by state of observation.", "short",
              Query(f"max by (state) (hookd_modules{{{RANKS}}})", "{{state}}")),
    ]  # fmt: skip


def _device_memory() -> list[Panel]:
    cuda = [Query(f"max by (rank, device) (hookd_memory_device_{kind}_bytes{{{RANKS}}})", kind + " " + RANK + " device {{device}}")
            for kind in ("allocated", "reserved", "peak")]  # fmt: skip
    text = "Allocated, reserved by the allocator, and peak of the allocated (plugin memory)."
    return [lines("CUDA memory", text, "bytes", *cuda)]
