"""The repro bundle: a module call that went wrong, in a directory from which `hookd replay` shows it again.

    tensors.safetensors    every tensor, in the safetensors format (hookd_nan.bundle.tensorfile)
    bundle.json            all else; a tensor is referred to by its key in that file

Reading a bundle runs no code of it. `bundle.json` has
- `format` ("hookd bundle"), `version` (1), `made_by` (hookd, torch, python, run, rank, pid, time), `notes` (what could
  not be carried, in words), `settings` (of torch, process-wide) and `incident` (as it was told);
- `call`: `module` (its name), `where`, `kind`, `masks` (whether `-inf` is no finding), `inputs`, `kwargs`, `output` (null
  where it was not kept), `gradient` (of the outputs, for a backward; else an empty tuple), `inputs_changed` (whether the call changed its inputs in place; null: unknown), `state` (as the module was entered:
  `random`, by device, where the module may draw any, `grad`, `inference`, `autocast`; null: unknown);
- `module`: `module` and `qualname` of its class, the `file` of that, `extra_repr`, `training`, `attributes`,
  `parameters`, `buffers`, `children` (the same again; `{"$same": "path"}` for one that is shared) and `hooks` (of
  others, by name; they are not carried). Parameters and buffers are as the call has left them;
- `tensors`: of each key `dtype`, `shape`, `stride`, `device`, `requires_grad`, `is_leaf` and `is_parameter`.

Values are JSON's own where they can be, and else an object with one of the keys `$tensor`, `$tuple`, `$dict`,
`$fields` (dataclasses and namespaces), `$named` (named tuples), `$float` (nan, inf), `$dtype`, `$device`, `$size`,
`$slice`, `$ref` (a weak reference), `$function` (one of torch.nn.functional) or `$gone` (what it was that could not be carried).
"""
