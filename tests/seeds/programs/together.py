"""Runs several of these programs, one after the other: `together.py "s4.py plain" s6.py`."""

import pathlib
import runpy
import sys

for words in sys.argv[1:]:
    name, *sys.argv[1:] = words.split()
    print("==", name)
    runpy.run_path(str(pathlib.Path(__file__).with_name(name)), run_name="__main__")
