"""Parameter groups: which parameters they have, what is refused, and that a job steps each with its own settings."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.harness import a_plan, large_model, model
from helpers.stepping import stepped
from kvps_aggregator.step.shard_arrays import ShardArrays

import kvps
from kvps import ParameterGroup, optim
from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.optim.schedules import CosineAnnealingLR, StepLR
from kvps.store import Store

GROUPED = kvps.AdamW(
    lr=0.01,
    groups=(
        ParameterGroup(["b", "s*"], weight_decay=0.0, lr=StepLR(0.1, every=2)),
        ParameterGroup("?", beta1=0.5, eps=1e-5),
    ),
)


def test_the_first_group_that_matches_has_a_parameter() -> None:
    names = ["W", "b", "scale", "V[0]", "V0"]
    sgd = kvps.SGD(
        lr=1.0,
        groups=[
            ParameterGroup("b", lr=2.0),
            ParameterGroup(["?", "sc*"], lr=3.0),
            ParameterGroup("V[0]", lr=4.0),  # the name of a parameter, and as a pattern that of another
        ],
    )
    assert [each.lr for each in sgd.of_each(names)] == [3.0, 2.0, 3.0, 4.0, 1.0]
    assert [each.lr for each in sgd.of_each(["V0"])] == [4.0]


def test_a_job_has_the_state_that_any_group_needs() -> None:
    assert kvps.SGD(groups=(ParameterGroup("b", momentum=0.5),)).slots == ("momentum",)
    assert kvps.SGD(momentum=0.5, groups=(ParameterGroup("b", momentum=0.0),)).slots == ("momentum",)
    assert kvps.SGD(groups=(ParameterGroup("b", lr=0.5),)).slots == ()


def test_state_that_only_another_group_needs_is_zero() -> None:
    """Not what happens to be in memory: a replay must find the same."""
    config = JobConfig(optimizer=kvps.SGD(momentum=0.5, groups=(ParameterGroup("b", momentum=0.0),)))
    layout = Layout.of(model())
    arrays = ShardArrays(config, layout, 0)
    arrays.weights.fill(0)
    for version in (1, 2):
        arrays.next_state["momentum"].fill(np.nan)
        (chunk,) = arrays.chunks
        arrays.step(a_plan(version), chunk, [np.ones(layout.size, np.float32)] * 2)
        arrays.promote()
    momentum = layout.cut(arrays.state["momentum"])
    assert {name: set(array.reshape(-1).tolist()) for name, array in momentum.items()} == {
        "W": {1.5},
        "b": {0.0},
        "scale": {1.5},
    }


@pytest.mark.parametrize(
    ("optimizer", "shards"),
    [
        (GROUPED, 7),
        (kvps.SGD(momentum=0.9, nesterov=True, groups=(ParameterGroup("[Vb]", momentum=0.0, nesterov=False),)), 2),
        (kvps.DelayedNesterov(0.1, every=2, groups=(ParameterGroup("b", every=3, c=0.2, momentum=0.5),)), 1),
    ],
    ids=str,
)
def test_each_parameter_steps_as_if_its_group_were_the_whole_job(optimizer: kvps.SGD, shards: int) -> None:
    """The same bits, wherever groups, chunks and shards are cut."""
    gradients = [large_model(seed) for seed in range(1, 4)]
    ended = stepped(optimizer, large_model(), gradients, shards)
    for name, settings in zip(ended, optimizer.of_each(list(ended)), strict=True):
        alone = optim.from_json(settings.to_json() | {"groups": []})
        wanted = stepped(alone, {name: large_model()[name]}, ({name: each[name]} for each in gradients))
        np.testing.assert_array_equal(ended[name], wanted[name], name)


def test_a_name_that_no_parameter_has_is_refused_before_there_is_a_job(store: Store) -> None:
    sgd = kvps.SGD(groups=(ParameterGroup(["b", "*.bias"], weight_decay=0.0),))
    with pytest.raises(kvps.InvalidSetting, match=r"no parameter is called '\*\.bias', .*: the job has W, b, scale$"):
        store.create_job("job", model(), optimizer=sgd)
    assert store.jobs() == []


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"names": ["b"], "beta1": 0.5}, "sgd has no setting 'beta1' for a group: it has lr, maximize, momentum"),
        ({"names": ["b"], "groups": []}, "sgd has no setting 'groups' for a group"),
        ({"names": ["b"], "momentum": 2}, "momentum must be in [0, 1), it is 2"),
        ({"names": ["b"], "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"names": ["b"], "nesterov": 1}, "nesterov must be true or false, not 1"),
        ({"names": ["b"], "lr": {"kind": "cosine"}}, "cosine needs initial, over"),
        ({"names": ["b"], "momentum": {"kind": "step"}}, "momentum must be a finite number"),
        ({"names": []}, "a parameter group has 1 to 65536 names, not 0"),
        ({"names": ["\x1b[2J"]}, "a name in a parameter group must be printable text"),
        ({"names": "b"}, "a group must be an object with names"),
        (["b"], "a group must be an object with names"),
    ],
)
def test_a_damaged_group_is_refused_in_one_line(group: object, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        optim.from_json({"kind": "sgd", "lr": 0.1, "groups": [group]})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("groups", [3, [{"names": ["b"]}] * 1025])
def test_groups_that_are_no_list_of_a_bounded_size_are_refused(groups: object) -> None:
    with pytest.raises(kvps.InvalidSetting, match="groups must be a list of at most 1024"):
        optim.from_json({"kind": "sgd", "groups": groups})


def test_what_is_no_group_is_refused() -> None:
    for groups in (3, ("b",), ParameterGroup("b")):
        with pytest.raises(kvps.InvalidSetting, match=r"groups must be a tuple of kvps\.ParameterGroup"):
            kvps.SGD(groups=groups)  # type: ignore[arg-type]
    with pytest.raises(kvps.InvalidSetting, match="a parameter group has names of parameters, not 3"):
        ParameterGroup(3)  # type: ignore[arg-type]
    with pytest.raises(kvps.InvalidSetting, match="momentum must be a finite number, not CosineAnnealingLR"):
        kvps.SGD(momentum=CosineAnnealingLR(0.5, over=10))  # type: ignore[arg-type]


def test_an_optimizer_that_would_not_be_read_back_is_refused() -> None:
    names = [f"{'x' * 1000}{number}" for number in range(5000)]
    with pytest.raises(kvps.InvalidSetting, match=r"optimizer is 50.* characters as JSON, at most 4194304"):
        JobConfig(optimizer=kvps.SGD(groups=(ParameterGroup(names, lr=0.5),)))
