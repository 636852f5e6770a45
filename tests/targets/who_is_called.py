"""Run a training script and print, as JSON, the name of every module that it calls: found with torch's own hooks.

The outermost call is a root; the first root that is trained names its modules as `named_modules()` does.
"""

import json
import runpy
import sys
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook

names = {}  # of the modules of the first root
called = set()


def note(module, inputs):
    if not names:
        names.update({id(child): name or "(root)" for name, child in module.named_modules()})
        kept.append(module)
    if id(module) in names:
        called.add(names[id(module)])


kept = []  # so that no id is used again
register_module_forward_pre_hook(note)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps(sorted(called)), flush=True)
