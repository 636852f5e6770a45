"""Shared by the targets: arguments, step lines, the closing checksum. They know nothing of hookd."""

import argparse
import hashlib
import itertools
import os
import time

import torch


def parse(**flags):
    """Return the arguments; `flags` are additional ones with their defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30, help="0: for ever")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
    parser.add_argument("--hurry", default="", metavar="FILE", help="do not sleep any more once it is there")
    for name, default in flags.items():
        parser.add_argument("--" + name, type=type(default), default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return arguments


def train(arguments, model, loss_of, optimizer=None):
    """Take the steps, print a line for each, and at the end the checksum of all parameters and buffers."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in itertools.count(1) if arguments.steps == 0 else range(1, arguments.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9g}", flush=True)
        pause(arguments)
    print("done", checksum(model), flush=True)


def pause(arguments):
    """Sleep for the time by which a step is to take longer."""
    if not (arguments.hurry and os.path.exists(arguments.hurry)):
        time.sleep(arguments.pause)


def checksum(model):
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().double().numpy().tobytes())
    return digest.hexdigest()
