"""The agent: the side of hookd that lives inside a training process. Imports torch, the standard library and hookd._pluggy.

`boot` begins and ends it. `entry` runs at each module call, `events` notices everything else that happens in the training, and
`modeltree` knows the models. `plugins` calls the plugins, `tensors` reads numbers, `remote` answers the tool.
"""
