"""The repro bundle: a bad module call in a directory, from which `hookd replay` repeats it.

    tensors.safetensors    every tensor, in the safetensors format (hookd_capture.bundle.tensorfile)
    bundle.json            everything else; it refers to a tensor by its key in that file

Reading a bundle runs none of its contents. `bundle.json` has
- `format`: "hookd bundle"; `version`: 1;
- `made_by`: hookd, torch, python, run, rank, pid, time;
- `notes`: what is missing in the bundle, in words;
- `settings`: process-wide settings of torch;
- `incident`: the incident as it was reported;
- `call`:
  - `module`: the name of the module; `where` and `kind` of the bad value;
  - `masks`: whether `-inf` alone is good;
  - `inputs`, `kwargs`, and `output` (null if it was not kept);
  - `gradient`: of the outputs, for a backward; else an empty tuple;
  - `inputs_changed`: whether the call changed its inputs in place; null if unknown;
  - `state` when the module was entered: `random` (by device, if the module may draw random numbers), `grad`,
    `inference`, `autocast`; null if unknown;
- `module`: `module`, `qualname` and `file` of its class, `extra_repr`, `training`, `attributes`, `parameters`, `buffers`,
  `children` (the same again; `{"$same": "path"}` for a shared one), `empty` (names of children that are None) and `hooks`
  (names of other tools' hooks, which are not in the bundle). Parameters and buffers are as they were after the call;
- `tensors`: for each key `dtype`, `shape`, `stride`, `device`, `requires_grad`, `is_leaf` and `is_parameter`.

A value is plain JSON if possible, and otherwise an object with one of the keys `$tensor`, `$tuple`, `$dict`, `$fields`
(dataclasses and namespaces), `$named` (named tuples), `$float` (nan, inf), `$dtype`, `$device`, `$size`, `$slice`, `$ref`
(a weak reference), `$function` (a function of torch.nn.functional) or `$gone` (a description of what could not be saved).
"""
