"""What a round costs in instructions: a process that needs more than the repository says is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.paths import program_on_path
from kvps_bench import instructions
from kvps_bench.instructions import SLACK, Case, measure


@pytest.mark.slow
def test_a_round_takes_so_many_millions_of_instructions() -> None:
    """Over twenty rounds: the start of one process takes some ten million more or fewer from run to run."""
    program_on_path("valgrind")
    taken = measure(Case("400B", 100, "redis", 10))
    assert set(taken) == set(SLACK)
    assert all(0.1 < millions < 100 for millions in taken.values()), taken


def test_the_repository_has_the_figures_that_are_compared() -> None:
    small = {(f"40KB {transport}", role) for transport in ("redis", "shm") for role in SLACK}
    assert set(instructions.known()) == small | {("4MB redis", "worker"), ("4MB shm", "worker")}
    assert {case.name for case in instructions.CASES} == {case for case, _ in instructions.known()}


def test_a_case_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        instructions.main(["--only", "40kb"])
    assert "no case has '40kb' in its name: there are 40KB redis, " in capsys.readouterr().err


def test_a_process_that_needs_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The median of three counts; a role whose figure is not known is only shown."""
    figures, asked = tmp_path / "instructions.txt", list[Case]()
    figures.write_text("# why\n40KB redis worker 1.5\n40KB redis server 2 the log has a field more\n")
    monkeypatch.setattr(instructions, "FIGURES", figures)
    workers = iter([1.6, 1.5, 1.55, 1.4])

    def measured(case: Case) -> dict[str, float]:
        asked.append(case)
        return {"worker": next(workers), "server": 2.01, "aggregator": 3.0}

    monkeypatch.setattr(instructions, "measure", measured)
    assert instructions.main(["--times", "1", "--only", "40KB redis"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (len(asked), len(lines)) == (3, 4)
    assert lines[0].split() == ["40KB", "redis", "worker", "1.550", "1.033", "of", "1.5:", "more", "than", "1.02"]
    assert ["more than" in line for line in lines] == [True, False, False, False]
    assert instructions.main(["--times", "1", "--only", "40KB redis"]) == 0
    assert len(asked) == 4
