"""kvps_bench diloco: a tiny run over hosts, the bytes that it counts, and its options."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.commands import bench_run
from kvps_bench.diloco import DDP, EACH, LOCAL, Curve, Look
from kvps_bench.hosts import Network, NoHosts
from kvps_bench.small_gpt import Size, SmallGpt, batches, text

TINY = ["--workers", "2", "--size", "1,32,8,1", "--local-steps", "10", "--batches", "20"]


@pytest.mark.slow  # it starts many processes
def test_each_way_is_trained_and_its_bytes_are_counted(home: object) -> None:
    try:
        Network(1).__exit__()
    except NoHosts as why:
        pytest.skip(str(why))
    done = bench_run("diloco", *TINY, "--warm-up", "3", "--target", "5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["case"]: row for row in found["rows"]}
    assert rows.keys() == {LOCAL, EACH, DDP}
    assert (rows[LOCAL]["batches"], rows[EACH]["batches"], rows[DDP]["batches"]) == (20, 20, 2)
    for row in rows.values():
        assert 0 < row["loss"] < 5
        assert row["s_to_target"] != "not reached"
    loss, nbytes, faster = (bar["ratio"] for bar in found["bars"])
    assert 0.9 < loss < 1.1
    assert 0.05 < nbytes < 0.2, "a tenth, and what membership and waiting cost"
    assert faster > 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--size", "4,192,32", "--size must be layers, width, context, batch"),
        ("--size", "4,100,32,1", "with a width divisible by 32"),
        ("--local-steps", "1", "--local-steps must be from 2 to 10000"),
        ("--workers", "1", "--workers must be from 2 to 100, not 1: each has its own host"),
        ("--mbit", "0", "--mbit must be from 0.1"),
        ("--against", "horovod", "--against must be of each, ddp"),
        ("--outer", "warp", "optimizer 'warp' is unknown"),
    ],
)
@pytest.mark.slow
def test_a_wrong_option_is_told_in_one_line(option: str, value: str, words: str) -> None:
    done = bench_run("diloco", option, value)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


@pytest.mark.slow
def test_the_model_learns_and_begins_alike() -> None:
    size = Size(layers=1, width=32, context=8, batch=8)
    model, characters = SmallGpt(size), text()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), SmallGpt(size).parameters(), strict=True))
    before = model.held_out(characters, size)
    optimizer, each = torch.optim.AdamW(model.parameters(), lr=0.01), batches(characters, size, 0)
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(next(each)).backward()
        optimizer.step()
    assert model.held_out(characters, size) < before - 1


def test_a_curve_says_when_a_loss_was_reached() -> None:
    curve = Curve([Look(10, 1.0, 3.0, 5), Look(20, 2.5, 2.0, 9), Look(30, 3.0, 2.2, 12)])
    assert [curve.seconds_to(loss) for loss in (3.5, 2.5, 1.0)] == [1.0, 2.5, None]
    assert curve.times().seconds == [1.0, 1.5, 0.5]
