"""How each command in the documents is tested: tests/e2e/test_documented.py runs them in this order.

A new command in a document goes into `COMMANDS`, as it is printed there (without its comment):

- `Run(…)`: it is run, in the test's real setting: a daemon, a training `train.py` of the run "llama"; `fill` replaces
    words of the command;
- `By(node)`: the test at `node` runs it already, because it takes long or needs another setting;
- `Cannot(why, node)`: it cannot be run here; the test at `node`, if there is one, checks its parts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Run:
    """A command that is run.

    Attributes:
        says: a regular expression that its output on stdout and stderr must match.
        status: its exit code.
        given: the state before it: "attached", "detached" (the training), or "" for as the last command has left it.
        fill: replacements of its words, besides those of the setting.
        alone: without a daemon: the command does its work by itself.
        stays: it does not end by itself: when `says` is printed it is interrupted, as by Ctrl-C, and must exit with `status`.
        until: another command of the documents that is run before that interrupt.
        then: a command that is run after it, to show its effect; `says` must then match this command's output.
        at_home: in the repository, not in a directory with a copy of deploy/, examples/ and train.py.
        needs: a program without which this is skipped.
    """

    says: str
    status: int = 0
    given: str = "attached"
    fill: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    stays: bool = False
    until: str = ""
    then: str = ""
    at_home: bool = False
    needs: str = ""


@dataclass(frozen=True)
class By:
    """A command that another test runs."""

    node: str


@dataclass(frozen=True)
class Cannot:
    """A command that cannot be run here, the reason, and the test of its parts ("": there is none)."""

    why: str
    node: str = ""


_FINGERPRINT = "tests/e2e/test_fingerprint.py::"
_PARTED = _FINGERPRINT + "test_two_runs_with_other_learning_rates_part_at_the_update"
_REPLAY = "tests/e2e/test_replay.py::"
_SOURCE = _REPLAY + "test_a_model_with_classes_of_the_script_needs_the_script_and_nothing_of_its_training_runs"
_DEPLOY = "tests/unit/test_deploy.py::"
_UNIT = _DEPLOY + "test_the_unit_starts_what_there_is"
_IMAGE = _DEPLOY + "test_what_the_image_is_built_of_is_in_its_context"
_DASHBOARDS = "tests/unit/test_dashboards.py::test_the_dashboards_are_those_that_the_generator_makes"
_KUBERNETES = Cannot(
    "no cluster", "tests/unit/test_deploy_kubernetes.py::test_a_kustomization_names_files_that_are_there"
)
_STOPWATCH = "tests/e2e/test_stopwatch.py::test_an_idea_becomes_a_number_in_prometheus"
_RELOADED = "tests/e2e/test_plugins.py::test_a_plugin_is_loaded_reloaded_and_goes_on_where_the_old_one_was"
_HALVES = "tests/e2e/test_plugins.py::test_plugins_in_the_daemon_are_notified_and_read_and_a_bad_one_stalls_nobody"
_ENTROPY = "tests/plugins/test_examples.py::test_entropy_is_that_of_the_weights_that_torch_gives"
_EXPERTS = "tests/plugins/test_examples.py::test_experts_are_counted_as_they_are_chosen"
_NOISE = "tests/plugins/test_examples.py::test_noise_is_that_of_the_formulas_whether_losses_are_divided_or_not"
_CURVES = "tests/unit/test_examples_daemon.py::test_tensorboard_reads_curves_of_gauges_and_counters_over_steps"
_AT_ONCE = "tests/e2e/test_examples_at_once.py::test_all_at_once_leave_the_training_as_it_is_and_keep_to_the_budget"
_INDEX = Cannot("it needs a package index")
_TOP = "tests/e2e/test_top.py::"
_TLS = "tests/integration/test_daemon_tls.py::test_prometheus_scrapes_over_mtls_with_a_password_and_a_renewal_costs_no_scrape"
_SLURM = Cannot("no Slurm", _DEPLOY + "test_a_script_is_clean")
_QUICK = {"train.py": "train.py --steps 3"}
_FOUR = {"4": "{pid}"}
_OWN_PORT = {"127.0.0.1:9465": "127.0.0.1:{port}"}
_DOCKER_RUN = (
    "docker run --detach --name hookd --pid host --user 0:0 --read-only --tmpfs /run/hookd --tmpfs /tmp --cap-drop ALL "
    "--cap-add SYS_PTRACE --cap-add DAC_OVERRIDE --cap-add CHOWN --cap-add SYS_NICE --security-opt no-new-privileges "
    "--volume hookd:/var/lib/hookd --env HOOKD_LISTEN=0.0.0.0:9465 --publish 127.0.0.1:9465:9465 hookd:0.1.0"
)

COMMANDS: dict[str, Run | By | Cannot] = {
    # README.md, docs/start.md
    "make demo": By("tests/e2e/test_demo.py::test_the_demo_shows_the_whole_way"),
    "make check": Cannot("it is a part of this"),
    "make test": Cannot("this is it"),
    "make flakes": Cannot("it takes three hours"),
    "make arm": Cannot("it takes hours"),
    'make gpu-kit ARGS="--python 3.12"': _INDEX,
    "make gpu GPU_PYTHON=python3.12": Cannot("no GPU", "tests/e2e/test_gpu_kit.py::test_costs_are_measured"),
    "HOOKD_SCOPE=SLURM_JOB_ID=$SLURM_JOB_ID hookd serve": Cannot(
        "it needs Slurm; test_attach_discover.py has the variable"
    ),
    'make test ARGS="tests/unit -k page"': Cannot("this is it"),
    'make test JOBS=0 ARGS="--pdb -x"': Cannot("this is it"),
    "make docs": By("tests/unit/test_docs.py::test_the_site_is_made_without_a_warning"),
    "make help": Run("make demo .*\n(.*\n)*make test ", at_home=True, given="", needs="make"),
    "python3 -m venv /opt/hookd && /opt/hookd/bin/pip install .": Cannot(
        "it needs a package index",
        "tests/integration/test_native_build.py::test_a_wheel_carries_the_kernel_and_is_for_this_kind_of_machine",
    ),
    "ln -sf /opt/hookd/bin/hookd /usr/local/bin/hookd": Cannot("it changes this machine", _UNIT),
    "python examples/train.py": Run(r"step 1 loss(.*\n)*done 3 ", given="", fill={"train.py": "train.py --steps 3"}),
    "hookd ps": Run(r"\d+ +.*train\.py", given="detached"),
    "hookd serve": By("tests/e2e/test_cli.py::test_the_whole_way_through_a_daemon"),
    "hookd attach PID": Run(r"llama", given="detached"),
    "hookd status": Run(r"llama +0 +running"),
    "hookd report PID": Run(r"run llama, rank 0(.*\n)*.*blocks"),
    "hookd attach -p nan:every=1 -p gradclip:max_norm=1.0 PID": Run("llama", given="detached"),
    "hookd plugin config PID gradclip max_norm=0.5": Run("gradclip", given=""),
    "hookd plugin enable PID memory": Run("memory", given=""),
    "hookd plugin disable PID gradclip": Run("gradclip", given=""),
    "hookd detach PID": Run("the original again"),
    # docs/troubleshooting.md
    "hookd doctor": Run(r"ptrace +a child process", given=""),
    "hookd doctor PID": Run(r"agent +already attached"),
    # docs/attach.md
    "hookd attach --tree PID": Run("llama", given="detached"),
    "hookd attach --match 'ray::*Train*'": By(
        "tests/e2e/test_ranks.py::test_processes_that_have_renamed_themselves_are_found_by_match"
    ),
    "hookd serve --listen 127.0.0.1:9466 --control /run/mine/control.sock --state-dir /var/lib/mine": Run(
        r"http://127\.0\.0\.1:\d+", stays=True, until="hookd status --host unix:///run/mine/control.sock"
    ),
    # docs/steps.md
    "HOOKD_DETAIL=all hookd attach PID": Run(r"http://127\.0\.0\.1:\d+", given="detached", alone=True, stays=True),
    # docs/attach.md
    "hookd run -- python train.py": Run(r"step 1 loss(.*\n)*done 3 ", given="", fill=_QUICK),
    "hookd run -- torchrun --nproc-per-node 2 train.py": By(
        "tests/e2e/test_run.py::test_a_launcher_has_none_and_its_ranks_have"
    ),
    "hookd run -- accelerate launch train.py": Cannot(
        "accelerate is not among the test tools", "tests/e2e/test_ranks.py::test_the_ranks_of_accelerate_are_attached"
    ),
    # docs/plugins.md
    "hookd attach --plugin-dir . -p widths --listen 127.0.0.1:9465 PID": Run(
        r"http://127\.0\.0\.1:\d+",
        given="detached",
        alone=True,
        stays=True,
        fill=_OWN_PORT,
        until="curl -s http://127.0.0.1:9465/metrics | grep widths",
    ),
    # docs/tutorials/first-plugin.md
    "hookd plugin new spread": By(_STOPWATCH),
    "cd hookd-spread": By(_STOPWATCH),
    "hookd plugin check .": By(_STOPWATCH),
    "hookd attach --plugin-dir . -p spread:every=1 --listen 127.0.0.1:9465 $PID &": By(_STOPWATCH),
    "promtool query instant http://127.0.0.1:9090 'hookd_spread_output'": By(_STOPWATCH),
    # docs/plugins-shipping.md, docs/daemon-plugins.md
    "hookd plugin new spread --daemon": By(
        "tests/integration/test_testing.py::test_the_packages_that_new_writes_pass_their_own_tests_and_the_check"
    ),
    "pip install 'hookd-spread[daemon]'": _INDEX,
    "hookd plugin enable PID widths --plugin-dir .": By(_RELOADED),
    "hookd plugin config PID widths every=10": By(_RELOADED),
    "hookd plugin reload PID widths --plugin-dir .": By(_RELOADED),
    "hookd plugin disable PID widths": By(_RELOADED),
    "hookd serve --plugin-dir .": By(_HALVES),
    "curl -s http://127.0.0.1:9465/metrics | grep spread": By(_HALVES),
    # docs/tutorials
    "hookd attach --plugin-dir examples/plugins -p entropy --listen 127.0.0.1:9465 PID": By(_ENTROPY),
    "curl -s http://127.0.0.1:9465/metrics | grep hookd_entropy_ratio": By(_ENTROPY),
    "hookd attach --plugin-dir examples/plugins -p 'experts:modules=*.gate,top=2' --listen 127.0.0.1:9465 PID": By(
        _EXPERTS
    ),
    "curl -s http://127.0.0.1:9465/metrics | grep hookd_experts": By(_EXPERTS),
    "hookd attach --plugin-dir examples/plugins -p noise:batch=8 --listen 127.0.0.1:9465 PID": By(_AT_ONCE),
    "curl -s http://127.0.0.1:9465/metrics | grep hookd_noise": By(_NOISE),
    "pip install tensorboard": _INDEX,
    "hookd serve --config tensorboard.toml --plugin-dir examples/plugins": By(_AT_ONCE),
    "tensorboard --logdir curves": Cannot(
        "TensorBoard's own pages stay until they are ended; its reader is asked instead", _CURVES
    ),
    # docs/otlp.md
    "pip install 'hookd[otlp]'": _INDEX,
    "hookd serve --config otlp.toml": By("tests/unit/test_daemon_otlp.py::test_a_daemon_sends_what_it_serves"),
    "HOOKD_OTLP_ENDPOINT=http://127.0.0.1:4318 hookd attach PID": By(
        "tests/unit/test_daemon_otlp.py::test_a_daemon_sends_what_it_serves"
    ),
    "hookd serve --config slack.toml --plugin-dir examples/plugins": By(_AT_ONCE),
    # docs/top.md
    "hookd top [PID|RUN]": By(_TOP + "test_targets_then_modules_at_80_columns"),
    "hookd top [PID|RUN] -d 5": By(_TOP + "test_targets_then_modules_at_80_columns"),
    "hookd top [PID|RUN] --user USER": By("tests/unit/test_top.py::test_the_targets_of_one_user_can_be_asked_for"),
    "hookd top [PID|RUN] --once": By(_TOP + "test_without_a_terminal_there_is_one_table_or_json"),
    "hookd top [PID|RUN] --json": By(_TOP + "test_without_a_terminal_there_is_one_table_or_json"),
    # docs/security.md
    "hookd serve --listen 0.0.0.0:9465 --web-config /etc/hookd/web-config.yml": By(_TLS),
    "deploy/web/certificates.sh /etc/hookd node1 10.0.0.7": By(_TLS),
    "htpasswd -nBC 10 prometheus": Cannot("it is Apache's, and asks for a password", _TLS),
    "promtool check web-config /etc/hookd/web-config.yml": By(
        "tests/unit/test_webconfig.py::test_the_example_is_one_and_promtool_accepts_it"
    ),
    # docs/incidents.md, docs/ranks.md
    "hookd attach --tree PID -p timing -p drift:every=100": Run("with timing, drift", given="detached"),
    "hookd incidents": Run(r"#\d+ .*llama"),
    "hookd incidents --follow": Run(r"#\d+ .*llama", stays=True, status=130),
    "hookd incidents --run llama --kind nan --since 2h": Run(r"#\d+ .*nan .*llama/0"),
    "hookd incidents --user alice": Run(r"#\d+ .*llama", fill={"alice": str(os.getuid())}),
    "hookd incidents --json --follow | jq .": Run(
        r'"run": "llama"',
        stays=True,
        status=130,
        needs="jq",
        fill={"jq .": "jq --unbuffered ."},  # as in a terminal
    ),
    "hookd report 4711": Run("run llama, rank 0"),
    "hookd report llama": Run("RANK"),
    "hookd report '#12'": Run("llama"),
    "hookd report 4711 --html report.html": Run(r"report written to report\.html"),
    "sqlite3 -readonly /var/lib/hookd/incidents.sqlite \"SELECT * FROM readable WHERE kind = 'nan'\"": Run(
        r"\|llama\|0\|\d+\|nan\|", needs="sqlite3"
    ),
    # docs/capture.md, docs/nan.md
    "hookd attach -p nan -p capture PID": Run("with nan", given="detached"),
    "hookd plugin config PID nan policy=report": Run("nan"),
    "hookd replay /home/me/.local/state/hookd/bundles/hookd-capture-…": By(
        _REPLAY + "test_the_failure_of_a_killed_training_is_seen_again_in_a_process_of_its_interpreter"
    ),
    "hookd replay BUNDLE --python ~/envs/train/bin/python": By(
        _REPLAY + "test_the_failure_of_a_killed_training_is_seen_again_in_a_process_of_its_interpreter"
    ),
    "hookd replay BUNDLE --source train.py": By(_SOURCE),
    "hookd replay BUNDLE --source replay_source.py": By(_SOURCE),
    "hookd replay BUNDLE --allow-import mypackage": By(
        _REPLAY + "test_an_installed_package_is_imported_where_it_is_allowed"
    ),
    # docs/on-demand.md
    "hookd stack PID": Run("MainThread"),
    "hookd stack PID --native": Run("MainThread", needs="py-spy"),
    "hookd stack PID --blocking": Run("MainThread"),
    "hookd stack PID --json": Run('"threads"'),
    "hookd stack 4": Run("MainThread", fill=_FOUR),
    "hookd snapshot PID": Run(r"\(root\) +Model"),
    "hookd snapshot PID --depth 2": Run("blocks"),
    "hookd snapshot PID --all": Run(r"qkv"),
    "hookd snapshot PID --json": Run('"modules"'),
    "hookd snapshot 4": Run(r"\(root\) +Model", fill=_FOUR),
    "hookd eval PID EXPR": Run(r"^\d+$", fill={"EXPR": "step"}),
    "hookd eval PID EXPR --timeout 5": Run(r"^\d+$", fill={"EXPR": "step"}),
    "hookd eval PID EXPR --json": Run('"value"', fill={"EXPR": "step"}),
    "hookd eval 4 'optimizers[0].param_groups[0][\"lr\"]'": Run(r"^0\.\d+$", fill=_FOUR),
    "hookd eval 4 'model.blocks[0].attention.qkv.weight.norm()'": Run(r"^tensor\(", fill=_FOUR),
    "hookd trace 4711 --steps 3": Run(r"hookd-trace-\d+\.json: steps \d+ to \d+"),
    # docs/fingerprints.md
    "hookd fingerprint --twice -- python train.py --steps 20": By(
        _FINGERPRINT + "test_a_command_is_run_twice_and_said_to_compute_the_same"
    ),
    "hookd run --fingerprint old.jsonl -- python train.py": By(_PARTED),
    "hookd run --fingerprint new.jsonl -- python train.py --lr 3e-5": By(_PARTED),
    "hookd diff old.jsonl new.jsonl": By(_PARTED),
    "hookd fingerprint PID -o job.jsonl --steps 100": By(
        _FINGERPRINT + "test_a_running_job_is_recorded_beside_the_plugins_that_are_there"
    ),
    "hookd record 4711 --seconds 10": Run(r"hookd-record-\d+\.svg: 1\.", fill={"10": "1"}),
    "hookd record 4711 --steps 20": Run(r"and 2 steps", fill={"20": "2"}),
    "hookd record 4711 -o run.json": Run(r"run\.json: 1\.", fill={"-o": "--seconds 1 -o"}),
    "hookd record 4711 --rate 1000 --seconds 2": Run(r"\.svg: 1\.", fill={"--seconds 2": "--seconds 1"}),
    # docs/start.md
    "curl -s http://127.0.0.1:9465/metrics | grep hookd_steps_total": Run(
        r'hookd_steps_total\{rank="0",run="llama"\} \d', needs="curl"
    ),
    # docs/alerts.md, docs/dashboards.md, docs/operations.md
    "promtool check rules deploy/prometheus/rules/*.rules.yml": Run("SUCCESS", given="", needs="promtool"),
    "promtool test rules deploy/prometheus/tests/*.test.yml": By(
        "tests/unit/test_prometheus_rules.py::test_rules_are_valid_and_pass_their_own_tests"
    ),
    "python deploy/kubernetes/generate.py https://git.example.org/hookd/blob/main/ https://grafana.example.org/": Run(
        "(?s).*", given=""
    ),
    "sed -i 's|runbook_url: |&https://git.example.org/hookd/blob/main/|' deploy/prometheus/rules/*.rules.yml": Run(
        "https://git.example.org/hookd/blob/main/docs/alerts.md",
        given="",
        then="cat deploy/prometheus/rules/hangs.rules.yml",
    ),
    "sed -i 's|dashboard_url: |&https://grafana.example.org/|' deploy/prometheus/rules/*.rules.yml": Run(
        r"https://grafana\.example\.org/d/hookd-ranks/",
        given="",
        then="cat deploy/prometheus/rules/hangs.rules.yml",
    ),
    "sed -i 's|}}http://|}}https://|' deploy/prometheus/rules/*.rules.yml": Run(
        r"}}https://\{\{ \. \| first", given="", then="cat deploy/prometheus/rules/hangs.rules.yml"
    ),
    'amtool silence add alertname=HookdTargetLost run=llama user=alice --duration 2h --comment "moved to another node"': Cannot(
        "no Alertmanager"
    ),
    "pip install grafana-foundation-sdk==0.0.21": Cannot("it needs a package index", _DASHBOARDS),
    "python deploy/grafana/generate.py && python deploy/kubernetes/generate.py": By(_DASHBOARDS),
    "install -D -m 644 examples/hookd.toml /etc/hookd/hookd.toml": Cannot("it changes this machine", _UNIT),
    "install -m 644 deploy/systemd/hookd.service /etc/systemd/system/": Cannot("it changes this machine", _UNIT),
    "systemctl daemon-reload && systemctl enable --now hookd": Cannot("it changes this machine", _UNIT),
    "systemctl disable --now hookd": Cannot("it changes this machine", _UNIT),
    "docker build -f deploy/docker/Dockerfile -t hookd:0.1.0 .": Cannot("no container engine", _IMAGE),
    "docker compose -f deploy/docker/compose.yaml up --build": Cannot(
        "no container engine", _DEPLOY + "test_the_compose_file_names_what_there_is"
    ),
    _DOCKER_RUN: Cannot("no container engine", _IMAGE),
    "kubectl apply -k deploy/kubernetes/base": _KUBERNETES,
    "kubectl apply -k deploy/kubernetes/monitoring": _KUBERNETES,
    "kubectl kustomize deploy/kubernetes/example": _KUBERNETES,
    "install -D -m 755 -t /opt/hookd/slurm deploy/slurm/*.sh": Cannot("it changes this machine", _SLURM.node),
    "sbatch deploy/slurm/train.sbatch": _SLURM,
    "deploy/slurm/attach.sh 4711": _SLURM,
    "promtool check config deploy/prometheus/prometheus.yml": By(_DEPLOY + "test_prometheus_accepts_the_configuration"),
    "promtool check service-discovery deploy/prometheus/prometheus-http-sd.yml hookd": Cannot(
        "it asks the daemons that are named there", _DEPLOY + "test_prometheus_accepts_the_configuration"
    ),
    "hookd detach --all": By("tests/e2e/test_cli.py::test_keep_leaves_the_agent_and_detach_all_finds_it"),
}

NO_COMMANDS = {
    ("README.md", "TRAINING PROCESS"): "a drawing",
    ("docs/deaths.md", "hookd WARNING: lost"): "a line of a log",
    ("docs/deaths.md", "process 4711 ended"): "a message",
    ("docs/fingerprints.md", "Equal in 20 steps."): "what a command prints",
    ("docs/fingerprints.md", "Step 1: same batch"): "what a command prints",
    ("docs/fingerprints.md", '{"hookd fingerprint": 1'): "lines of a file",
    ("docs/hangs.md", "hang in process"): "a message",
    ("docs/hangs.md", "hang_over in process"): "a message",
    ("docs/hangs.md", "max(after_s"): "a formula",
    ("docs/capture.md", "capture: Inf in"): "what an attach prints",
    ("docs/nan.md", "first Inf:"): "what an attach prints",
    ("docs/operations.md", "hookd_steps_total *"): "PromQL",
    ("docs/operations.md", "count by (run) ("): "PromQL",
    ("docs/gpu.md", "DCGM_FI_DEV_GPU_UTIL"): "PromQL",
    ("docs/tutorials/first-plugin.md", "cat > prometheus.yml"): "tests/e2e/test_stopwatch.py runs it as it is",
    ("docs/plugins-shipping.md", "payload has sha256"): "lines of a log",
    ("docs/plugins-shipping.md", "widths: AttributeError"): "what `hookd plugin list` prints",
    ("docs/top.md", "hookd top: 2 targets"): "a screen",
    ("docs/top.md", "charlm.py rank 0"): "a screen",
    ("docs/tutorials/experts.md", "hookd_experts_imbalance_ratio"): "PromQL",
    ("docs/tutorials/noise.md", "square = "): "formulas",
    ("docs/operations.md", "# slurm.conf"): "a configuration",
    ("docs/ranks.md", "lateness(r, stage)"): "a formula",
    ("docs/ranks.md", "score(r)"): "a formula",
    ("docs/ranks.md", "drift  the replica"): "what an incident says",
}
"""Blocks that are neither commands nor Python nor TOML: their page, how they begin, and what they are."""
