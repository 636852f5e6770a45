"""Compare fingerprints where less is compared than the digest of a step is of."""

from __future__ import annotations

import pytest

from hookd.tool.fingerprints import comparison
from hookd.tool.fingerprints.comparison import DIFFERENT, EQUAL, INCOMPARABLE, Terms
from hookd.tool.fingerprints.file import Fingerprint
from hookd.tool.fingerprints.steps import Entry, Key, Step
from hookd.tool.fingerprints.tolerance import Tolerance

SHAPE = ("float32", (2, 3))
GRADIENT, BATCH = Key("gradients", "w", 0, "grad", *SHAPE), Key("data", "(root)", 0, "input 0", *SHAPE)
NUMPY = Key("random", "", 0, "numpy", "", ())
COUNT = 40


def step(number, batch=0, norm=1.5, numpy=0):
    entries = {
        NUMPY: Entry(numpy, 0, 0.0, 0.0, 0.0),
        BATCH: Entry(number + batch, 0, 2.0, -1.0, 1.0),
        GRADIENT: Entry(hash(norm) + number, 0, norm, -1.0, 1.0),
    }
    return Step(number, is_absolute=True, settings=[{"optimizer": "SGD", "lr": 0.1}], entries=entries)


def run(rank=0, *, changed=None, every=10, **how):
    """A run of which each tenth step is whole, and of the others only the digest."""
    steps = {n: step(n, **how) for n in range(1, COUNT + 1)} | (changed or {})
    kept = {n: one if n == 1 or n % every == 0 else None for n, one in steps.items()}
    about = {"run": "train.py-1", "rank": rank, "pid": 1}
    return Fingerprint(about, kept, {n: one.digest() for n, one in steps.items()})


def test_steps_of_which_only_digests_were_kept_are_not_called_different_where_digests_say_nothing():
    near, numpy = run(norm=1.5000001), run(numpy=1)
    for other, terms in (
        (near, Terms(Tolerance(1e-3))),
        (numpy, Terms()),
        (run(batch=7), Terms(phases=frozenset({"gradients"}))),
    ):
        found = comparison.compare(run(), other, terms)
        assert (found.code, found.compared) == (EQUAL, 5)
        assert any(note.startswith("Of 35 steps only digests were kept") for note in found.notes)
    found = comparison.compare(run(), run(changed={13: step(13, norm=9.0)}))
    assert (found.code, found.step, found.compared) == (DIFFERENT, 13, COUNT)


def test_steps_that_only_one_of_two_equal_runs_has_are_named():
    def steps(*numbers):
        return Fingerprint({"run": "train.py"}, {n: step(n) for n in numbers}, {n: step(n).digest() for n in numbers})

    found = comparison.compare(steps(2, 3, 4), steps(0, 1, 2, 3, 4, 5))
    assert (found.code, found.compared) == (EQUAL, 3)
    assert found.notes == ["Not compared: steps 0 to 1 and 5, which only B has."]
    assert comparison.compare(steps(1, 2), steps(1)).notes == ["Not compared: step 2, which only A has."]


def test_a_tolerance_in_ulps_is_that_of_the_coarser_dtype():
    key = GRADIENT._replace(dtype="bfloat16")

    def coarse(norm):
        return Fingerprint(
            {"run": "train.py"},
            {1: Step(1, is_absolute=True, entries={key: Entry(7, 0, norm, -1.0, 1.0)})},
            {1: "coarse"},
        )

    def fine(norm):
        return Fingerprint(
            {"run": "train.py"},
            {1: Step(1, is_absolute=True, entries={GRADIENT: Entry(8, 0, norm, -1.0, 1.0)})},
            {1: "fine"},
        )

    unit = 2.0**-7
    for text, norm, code in (
        ("4ulp", 1 + 3.9 * unit, EQUAL),
        ("4 ulps", 1 + 4.2 * unit, DIFFERENT),
        ("0", 1.0, DIFFERENT),
    ):
        assert comparison.compare(coarse(norm), fine(1.0), Terms(Tolerance.parse(text))).code == code
    assert Tolerance.parse("4ulp:bfloat16") == Tolerance(4 * unit)
    assert comparison.compare(coarse(0.0), fine(0.0), Terms(Tolerance(1e-3))).code == EQUAL  # as a bias has at first


def one_step(key, *numbers):
    """A run of one step, with a batch and one other entry: digest, NaNs, norm, least, greatest element."""
    entries = {BATCH: Entry(1, 0, 2.0, -1.0, 1.0), key: Entry(*numbers)}
    return Fingerprint({"run": "train.py"}, {1: Step(1, is_absolute=True, entries=entries)}, {1: f"{key}{numbers}"})


def test_with_a_tolerance_other_shapes_and_equal_bits_of_another_dtype_differ():
    terms, known = Terms(Tolerance(1e-3)), one_step(GRADIENT._replace(dtype="float16"), 5, 0, 1.0, -1.0, 1.0)
    for change, norm in (({"shape": (3, 2)}, 1.0), ({"dtype": "bfloat16"}, 1.9)):
        key = GRADIENT._replace(**{"dtype": "float16", **change})
        assert comparison.compare(known, one_step(key, 5, 0, norm, -1.0, 1.0), terms).code == DIFFERENT


def test_with_a_tolerance_it_is_said_what_equal_means():
    output = Key("forward", "head", 0, "output 0", *SHAPE)
    runs = one_step(output, 5, 0, 1.0, -1.0, 1.0), one_step(output, 6, 0, 1.1, -1.0, 1.0)
    found = comparison.compare(*runs, Terms(Tolerance(ulps=4)))
    assert "Everything before it is equal." in found.sentence
    assert found.notes == ['"Same" and "equal" mean within a tolerance of 4 ulp.']
    for one, dtype in zip(runs, ("float32", "bfloat16"), strict=True):
        one.steps[1].entries[Key("forward", "first", 0, "output 0", dtype, (2,))] = Entry(
            dtype == "float32", 0, 1, 0, 1
        )
    assert (
        comparison.compare(*runs, Terms(Tolerance(ulps=4))).notes[1].endswith("compare with --tolerance 4ulp:bfloat16.")
    )


def test_a_random_state_counts_if_nothing_else_is_compared():
    found = comparison.compare(run(), run(numpy=1), Terms(phases=frozenset({"random"})))
    assert (found.code, found.phase) == (DIFFERENT, "random")
    assert found.sentence == "Step 1: the random state of numpy differs."
    found = comparison.compare(run(), run(numpy=1), Terms(phases=frozenset({"random", "gradients"})))
    assert found.code == EQUAL


def test_a_run_that_goes_on_where_the_other_ends_has_no_step_in_common_with_it():
    def part(begins, weights):
        keys = [Key(phase, "w", 0, "value", *SHAPE) for phase in ("weights", "update")]
        entries = dict(zip(keys, (Entry(bits, 0, 1.0, -1.0, 1.0) for bits in weights), strict=True))
        return Fingerprint({"run": "train.py"}, {begins: Step(begins, entries=entries)}, {begins: f"{weights}"})

    found = comparison.compare(part(1, (1, 2)), part(1, (2, 3)))
    assert (found.code, found.notes) == (INCOMPARABLE, ["B begins with the weights that A has after step 1."])
    assert found.advice == "Record more steps: A comes to the first step of the other file 1 step later."


def test_an_element_that_differs_where_the_norm_does_not_is_said():
    found = comparison.compare(one_step(GRADIENT, 5, 1, 1.0, -0.1, 0.5), one_step(GRADIENT, 6, 1, 1.0000001, -0.1, 0.6))
    assert "by 1.0e-07 of it, the greatest element 0.5 against 0.6)" in found.sentence
    assert "kernel" not in found.advice


@pytest.mark.parametrize(
    "text",
    ["", "nan", "inf", "-1", "4 bits", "1e400", "ulp", "4ulp:", "4ulp:int64", "1_0", "4", "128ulp:bfloat16"],
)
def test_what_is_not_a_tolerance_is_refused(text):
    with pytest.raises(ValueError, match=r"write|choose"):
        Tolerance.parse(text)


def test_a_loss_that_a_scaler_multiplies_is_told_from_another_loss():
    def of(norm):
        key = Key("loss", "", 0, "input 0", "float32", ())
        return Fingerprint(
            {"run": "train.py"},
            {1: Step(1, is_absolute=True, entries={key: Entry(int(norm * 8), 0, norm, 0.0, norm)})},
            {1: f"{norm}"},
        )

    for norm, is_scaled in ((65536 * 2.001, True), (1.0, False), (300.0, False)):
        assert ("GradScaler" in comparison.compare(of(2.0), of(norm)).advice) == is_scaled


def test_a_difference_after_steps_that_are_unknown_is_that_of_the_first_known_step():
    found = comparison.compare(run(), run(numpy=1, changed={20: step(20, norm=9.0, numpy=1)}))
    assert (found.code, found.step, found.phase) == (DIFFERENT, 20, "gradients")


def test_of_two_ranks_with_batches_of_their_own_only_what_replicas_have_in_common_is_compared():
    found = comparison.compare(run(), run(1, batch=7, every=1))
    assert (found.code, found.notes[0]) == (EQUAL, comparison.ABOUT_REPLICAS)
    parted = comparison.compare(run(), run(1, batch=7, changed={20: step(20, 7, norm=9.0)}))
    assert (parted.code, parted.step, parted.phase) == (DIFFERENT, 20, "gradients")
    assert comparison.compare(run(), run(batch=7)).phase == "data"  # another run of the same script
    same = comparison.compare(run(), run(1))  # as ranks of tensor parallelism have
    assert (same.code, same.compared, same.notes) == (EQUAL, COUNT, [])


def test_files_that_have_nothing_of_what_is_compared_are_not_called_equal():
    found = comparison.compare(run(), run(), Terms(phases=frozenset({"backward", "settings"})))
    assert (found.code, found.compared) == (INCOMPARABLE, 0)
    assert found.sentence.endswith("what is compared: backward.")
    assert comparison.compare(run(), run(), Terms(phases=frozenset({"settings"}))).code == EQUAL


def test_two_ranks_without_a_parameter_in_common_are_not_called_equal():
    """As two stages of a pipeline."""
    other = run(1, batch=7)
    for one in filter(None, other.steps.values()):
        one.entries[GRADIENT._replace(name="v")] = one.entries.pop(GRADIENT)
    assert comparison.compare(run(), other).code == INCOMPARABLE


def test_ranks_of_a_pipeline_with_parameters_of_other_shapes_are_not_called_different():
    def stage(rank, shape):
        steps = {n: step(n, batch=rank) for n in range(1, 4)}
        for one in steps.values():
            one.entries[Key("update", "0.weight", 0, "value", "float32", shape)] = Entry(rank, 0, 1.0, 0.0, 1.0)
        return run(rank, changed=steps, every=1)

    found = comparison.compare(stage(0, (8, 4)), stage(1, (4, 8)))
    assert (found.code, found.sentence) == (
        INCOMPARABLE,
        "The ranks hold other parts of the model: 0.weight is float32 8x4 against float32 4x8.",
    )
    assert comparison.compare(stage(0, (8, 4)), stage(1, (8, 4))).code == DIFFERENT
