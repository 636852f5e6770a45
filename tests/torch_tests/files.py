"""Which of torch's test files are run: those about modules, autograd, optimizers, hooks, subclasses and compilation."""

FILES = (
    "nn/test_*.py", "optim/test_*.py", "test_optim.py", "test_stateless.py", "test_subclass.py", "test_module_tracker.py",
    "test_flop_counter.py", "test_native_mha.py", "test_expanded_weights.py", "test_autograd.py",
    "dynamo/test_hooks.py", "dynamo/test_modules.py", "jit/test_hooks.py",
    "distributed/_composable/test_checkpoint.py", "distributed/_composable/test_contract.py",
)  # fmt: skip
SLOW = ("test_nn.py", "test_modules.py", "test_transformers.py", "inductor/test_compiled_autograd.py", "dynamo/test_misc.py",
        "dynamo/test_repros.py", "functorch/test_eager_transforms.py", "distributed/_composable/test_replicate*.py",
        "distributed/_composable/fsdp/*.py")  # fmt: skip
"""Minutes each, in each mode."""
