"""The modules of a run: their time, their outputs, how they learn, and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame import TO_MODULE, dashboard, filled, of_module, with_incidents
from panels import MODULE, MODULES, RANKS, Column, Query, a_step, lines, rate, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard
    from panels import Panel


def module() -> Dashboard:
    """Make the dashboard."""
    text = "The modules of a run. The table has all that are served; the curves have those that are chosen above."
    made = with_incidents(dashboard("hookd-module", "Module", text, of_module()))
    sections = {
        "All modules": [_table()],
        "Time": _time(),
        "Outputs": _outputs(),
        "Learning": _learning(),
        "Inside (plugins coverage, memory)": _inside(),
    }
    return filled(made, sections)


def _mean(metric: str) -> str:
    return f"avg by (module) ({metric}{{{RANKS}}})"


def _table() -> Panel:
    columns = [
        Column("Forward", "s", a_step("hookd_timing_forward_self_seconds_total", RANKS, "module")),
        Column("Backward", "s", a_step("hookd_timing_backward_self_seconds_total", RANKS, "module")),
        Column("Calls", "short", a_step("hookd_timing_forward_calls_total", RANKS, "module")),
        Column("Output std", "none", _mean("hookd_activations_std")),
        Column("Zeros", "percentunit", _mean("hookd_activations_zero_ratio")),
        Column("Gradient norm", "none", _mean("hookd_activations_grad_norm")),
        Column("Weight norm", "none", _mean("hookd_activations_weight_norm")),
        Column("Update", "sci", _mean("hookd_activations_update_ratio")),
        Column("NaN seen", "short", f"sum by (module) (hookd_nan_nonfinite_total{{{RANKS}}})", 1),
    ]
    text = (
        "A step of each module without those inside of it, and its numbers, the mean of the ranks. Click on a module."
    )
    return rows("Modules", text, columns, links=[("module", "The module", TO_MODULE)], sort="Forward")


def _of(metric: str, unit: str, title: str, text: str, width: int = 8) -> Panel:
    """Return the curves of a gauge of modules."""
    query = Query(f"max by (module, rank) ({metric}{{{MODULES}}})", MODULE)
    return lines(title, text, unit, query, width=width)


def _seconds(way: str) -> Query:
    return Query(
        a_step(f"hookd_timing_{way}_seconds_total", MODULES, "module, rank"), f"{way.replace('_', ' ')} {MODULE}"
    )


def _time() -> list[Panel]:
    a_call = (
        f"sum by (module, rank) ({rate('hookd_timing_forward_seconds_total', MODULES)})"
        f" / (sum by (module, rank) ({rate('hookd_timing_forward_calls_total', MODULES)}) > 0)"
    )
    return [
        lines("Forward", "Seconds of a step, modules inside included (plugin timing).", "s", _seconds("forward"), width=8),
        lines("Backward", "Seconds of a step, modules inside included; from sampled steps (plugin timing).", "s",
              _seconds("backward"), width=8),
        lines("A forward call", "Seconds of one call (plugin timing).", "s", Query(a_call, MODULE), width=8),
        lines("Without the modules inside", "Seconds of a step in the module itself (plugin timing).", "s",
              _seconds("forward_self"), _seconds("backward_self"), width=8),
        lines("On the device", "Seconds of a step that a CUDA device took (plugin timing).", "s",
              _seconds("forward_device"), _seconds("backward_device"), width=8),
        lines("Recompute", "Seconds of a step in calls that activation checkpointing makes again (plugin timing).", "s",
              _seconds("recompute"), width=8),
        lines("Inference", "Seconds in calls that no backward follows, for each step (plugin timing).", "s",
              _seconds("inference"), width=8),
    ]  # fmt: skip


def _outputs() -> list[Panel]:
    ends = [
        Query(f"{end} by (module, rank) (hookd_activations_{end}{{{MODULES}}})", f"{end} {MODULE}")
        for end in ("min", "max")
    ]
    bad = "Elements of the output that are NaN or infinite, at the last sampled step."
    return [
        _of("hookd_activations_mean", "none", "Mean", "Of the finite elements of the output, at the last sampled step."),
        _of("hookd_activations_std", "none", "Standard deviation", "Of the finite elements of the output."),
        lines("Range", "Smallest and largest element of the output.", "none", *ends, width=8),
        _of("hookd_activations_norm", "none", "Norm", "L2 norm of the output."),
        _of("hookd_activations_zero_ratio", "percentunit", "Zeros", "Share of the output that is exactly 0: of a ReLU the dead."),
        _of("hookd_activations_saturation_ratio", "percentunit", "Saturation",
            "Share of elements where the function is flat: Sigmoid, Tanh, GELU, SiLU ..."),
        _of("hookd_activations_nonfinite_elements", "short", "NaN and infinity", bad, width=12),
        lines("NaN so far", "Tensors with a NaN or an infinity, by place (plugin nan).", "short",
              Query(f"sum by (module, rank, where, kind) (hookd_nan_nonfinite_total{{{MODULES}}})",
                    "{{kind}} in {{where}} of " + MODULE)),
    ]  # fmt: skip


def _learning() -> list[Panel]:
    return [
        _of("hookd_activations_grad_norm", "none", "Gradient norm", "Of the module's own parameters, at the optimizer step."),
        _of("hookd_activations_weight_norm", "none", "Weight norm", "Of the module's own parameters, before the step."),
        _of("hookd_activations_update_ratio", "sci", "Update ratio", "Norm of what a step changes over the norm before it: about"
            " 1e-3 is usual."),
        _of("hookd_activations_grad_noise_ratio", "percentunit", "Gradient noise",
            "Share of the gradients' energy that differs from step to step."),
        lines("Findings", "1 while a module shows it: dead, saturated, vanishing, unchanged ...", "short",
              Query(f"max by (module, kind, rank) (hookd_activations_finding{{{MODULES}}})", "{{kind}} " + MODULE), width=8),
    ]  # fmt: skip


def _inside() -> list[Panel]:
    return [
        lines("Elements", "That the module itself holds: parameters, frozen ones, buffers (plugin coverage).", "short",
              Query(f"max by (module, kind, rank) (hookd_coverage_elements{{{MODULES}}})", "{{kind}} " + MODULE)),
        lines("Hooks of others", "On the module, by where they are from (plugin coverage).", "short",
              Query(f"max by (module, kind, function, rank) (hookd_coverage_hooks{{{MODULES}}})", "{{kind}} {{function}} " + MODULE)),
        _of("hookd_memory_output_bytes", "bytes", "Output size", "Of the module's outputs (plugin memory)."),
        _of("hookd_memory_forward_bytes", "bytes", "Memory of a forward",
            "By which CUDA's allocator grew during the forward (plugin memory)."),
        _of("hookd_coverage_training", "bool_yes_no", "Training mode", "At its last call in a sampled step (plugin coverage)."),
        lines("Mode switches", "Calls of train() and eval() a second (plugin coverage).", "cps",
              Query(f"sum by (module, mode, rank) ({rate('hookd_coverage_mode_switches_total', MODULES)})", "{{mode}}() " + MODULE),
              width=8),
    ]  # fmt: skip
