"""Runs a program once a line has come on stdin: what attaches before that sees its first call.

python told_to_begin.py PROGRAM [ARGUMENT...]
"""

import os
import runpy
import select
import sys

while not select.select([sys.stdin], [], [], 0.01)[0]:
    pass
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
