from __future__ import annotations

import pytest

from hookd.wire import labels

RUN_ID = "4f0a5a5e-6f0b-4e0e-9d3c-2f1f0c9a7b11"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOOKD_RUN": "llama", "SLURM_JOB_ID": "77"}, "llama"),
        ({"HOOKD_RUN": "  ", "SLURM_JOB_ID": "77"}, "77"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}, "77.0"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291", "TORCHELASTIC_RUN_ID": "big"}, "77"),
        ({"TORCHELASTIC_RUN_ID": "big"}, "big"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "None"}, ""),
        ({"TORCHELASTIC_RUN_ID": RUN_ID}, ""),
        ({}, ""),
    ],
)
def test_a_run_is_named_by_a_person_or_a_scheduler(environ, expected):
    assert labels.given_run(environ) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.py@3fa29b1c", ["train.py@3fa29b1c"]),
        ("train.py", ["train.py@3fa29b1c", "train.py@00000000~77"]),
        ("eval.py", ["eval.py"]),
        ("llama", []),
        ("train", []),
    ],
)
def test_a_run_may_be_called_by_its_name_without_the_tag(word, expected):
    runs = ["train.py@3fa29b1c", "train.py@00000000~77", "eval.py", "eval.py@3fa29b1c", "llama@home", "llama~77"]
    assert labels.called(runs, word) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/jobs/train.py", "train.py"),
        ("train.py", "train.py"),
        ("/site/torchtitan/__main__.py", "torchtitan"),
        ("-c", "python"),
        ("", "python"),
    ],
)
def test_a_script_is_named_by_its_last_part(script, expected):
    assert labels.script_name(script) == expected


def test_what_no_terminal_should_see_is_replaced_and_long_names_are_cut():
    assert labels.given_run({"HOOKD_RUN": "a\nb\x1b[31m\u202eü"}) == "a_b_[31m_ü"
    assert len(labels.given_run({"HOOKD_RUN": "x" * 1000})) == labels.MAX_RUN
    assert labels.given_run({"HOOKD_RUN": "x'; curl y | sh; '"}) == "x_; curl y | sh; _", "alerts quote it for a shell"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("0", 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, ("3", 1, 8)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "9"}, ("3", 0, 8)),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}, ("2", 0, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("0", 0, 1)),  # an sbatch script itself is not a task of a step
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, ("5", 0, 6)),
        ({"RANK": "x", "WORLD_SIZE": "-1"}, ("0", 0, 1)),
        ({"RANK": "\N{ARABIC-INDIC DIGIT THREE}", "WORLD_SIZE": "8", "SLURM_PROCID": "2"}, ("2", 0, 1)),
        (
            {"RANK": "3", "LOCAL_RANK": "\N{ARABIC-INDIC DIGIT ONE}", "WORLD_SIZE": "\N{ARABIC-INDIC DIGIT EIGHT}"},
            ("3", 0, 1),
        ),
    ],
)
def test_rank_local_rank_and_world_size_come_from_one_launcher(environ, expected):
    assert (labels.rank_label(environ), labels.local_rank(environ), labels.world_size(environ)) == expected


def settle(*jobs, chosen=False):
    """Claim for (pid, launcher, rank) in this order, all asking for the run "train.py"; return the runs that they get."""
    claims = []
    for pid, job, rank in jobs:
        claims.append(labels.claim(pid, job, rank, "train.py", chosen=chosen, others=claims))
    return [claim.run for claim in claims]


def test_two_jobs_of_one_script_are_told_apart_by_the_younger_ones_pid():
    assert settle((10, 10, "0"), (20, 20, "0")) == ["train.py", "train.py~20"]


def test_all_ranks_of_the_younger_job_get_its_launchers_pid():
    runs = settle((11, 10, "0"), (12, 10, "1"), (21, 20, "1"), (22, 20, "0"))
    assert runs == ["train.py", "train.py", "train.py~20", "train.py~20"]


def test_a_run_is_of_one_user_whatever_the_ranks_and_the_launcher():
    victim = labels.claim(11, 10, "0", "llama", chosen=True, others=[], uid=1)
    poser = labels.claim(12, 10, "1", "llama", chosen=True, others=[victim], uid=2)
    second = labels.claim(13, 10, "1", "llama", chosen=True, others=[victim, poser], uid=1)
    other = labels.claim(14, 10, "0", "llama", chosen=True, others=[victim, poser, second], uid=2)
    assert [one.run for one in (victim, poser, second, other)] == ["llama", "llama~10", "llama", "llama~10"]


def test_names_that_another_user_has_taken_on_purpose_are_not_shared():
    taken = []
    for name in ("llama", "llama~20", "llama~21", "llama~21.2"):
        taken.append(labels.claim(90 + len(taken), 90 + len(taken), "1", name, chosen=True, others=taken, uid=2))
    assert labels.claim(21, 20, "0", "llama", chosen=True, others=taken, uid=1).run == "llama~21.3"


def test_a_younger_job_with_other_ranks_is_still_another_job():
    assert settle((11, 10, "0"), (21, 20, "1")) == ["train.py", "train.py~20"]


def test_ranks_of_several_launchers_form_one_run_when_somebody_named_it():
    assert settle((11, 10, "0"), (21, 20, "1"), chosen=True) == ["train.py", "train.py"]
    assert settle((11, 10, "0"), (21, 20, "0"), chosen=True) == ["train.py", "train.py~20"]


def test_even_two_processes_of_one_launcher_with_one_rank_never_share_their_labels():
    runs = settle((11, 10, "0"), (12, 10, "0"), (13, 10, "0"))
    assert runs == ["train.py", "train.py~10", "train.py~13"]
