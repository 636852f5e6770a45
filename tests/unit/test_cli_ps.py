"""How `hookd ps` writes a command line."""

from __future__ import annotations

import pytest

from hookd.cli.ps import command

LONG = "/home/somebody/with/a/long/name/projects/vision/experiments/train.py"


@pytest.mark.parametrize(
    ("cmdline", "told"),
    [
        (["/opt/envs/train/bin/python3.11", "-u", "train.py", "--lr", "1"], "python3.11 -u train.py --lr 1"),
        (["python", "/srv/train.py", "--lr", "1"], "python /srv/train.py --lr 1"),
        (["/usr/bin/python", "-u", LONG, "--lr", "0.001"], "python -u …/train.py --lr 0.001"),
        (["/usr/bin/python", "-m", "pkg.train", "--seed", "3"], "python -m pkg.train --seed 3"),
        (["/usr/bin/python", LONG, "--data", "x" * 90], f"python …/train.py --data {'x' * 44}…"),
        (["/usr/bin/python", "-c", "import torch\nwork()"], "python -c import torch work()"),
        (["ray::RayTrainWorker.run /a/b"], "ray::RayTrainWorker.run /a/b"),
        ([], ""),
    ],
)
def test_the_script_and_its_arguments_are_seen(cmdline, told):
    assert command(cmdline, 70) == told
