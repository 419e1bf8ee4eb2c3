"""The weights of a job's best version so far, in a file of safetensors that any program loads.

    DIR/best/<job>.<id>.safetensors    name -> array; its metadata has job, id, version, by, figures and digest

It is no checkpoint: the optimizer's state of a version is gone when its evaluation is known. It lies in a folder of its
own, so that no command takes it for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvps.arrays.layout import Array
from kvps.errors import CorruptData, KvpsError, UsageError
from kvps.history.evaluations import Evaluation, Wanted, figures_json
from kvps.history.tensor_file import SUFFIX, TensorFile, drop_asides, write_tensors
from kvps.machine.files import make_directory, regular
from kvps.parsing import MOST_JSON, Fields, file_name

FOLDER = "best"
_WHAT = "the best version"


def best_file(directory: Path, job: str, id: str) -> Path:
    """Return where the best version of a job lies."""
    return directory / FOLDER / file_name(f"{job}.{id}{SUFFIX}", "the name of the file of the best version")


class Best:
    """The best version of one job. `evaluation` is that of the file, None before there is one."""

    def __init__(self, directory: Path, wanted: Wanted, job: str, id: str) -> None:
        """Go on from the file that an earlier evaluator, which has ended, left. Raises UsageError if it is none."""
        self.path = best_file(directory, job, id)
        drop_asides(self.path.parent)
        self.evaluation = best_of(self.path)
        self._wanted, self._job, self._id = wanted, job, id

    def inherit(self, job: str, id: str, version: int) -> bool:
        """Go on from the best version of a job from whose checkpoint of `version` this one comes, unless that was made
        later or this one has its own. Return whether it has one now. Raises UsageError, KvpsError."""
        origin = best_file(self.path.parent.parent, job, id)
        if self.evaluation or not (before := best_of(origin)) or before.version > version:
            return self.evaluation is not None
        with open(origin, "rb", opener=regular) as opened:
            file = TensorFile(opened, origin)
            facts, tensors = file.metadata.scalars(MOST_JSON), {name: file.array(name) for name in file.names}
        write_tensors(_WHAT, self.path, tensors, facts)
        self.evaluation = before
        return True

    def offer(self, evaluation: Evaluation, weights: Mapping[str, Array]) -> bool:
        """Write these weights if they are the best so far; return whether they are. Of equals the first one stays.
        Raises InvalidSetting if the figure is not there, KvpsError."""
        best = self.evaluation and self.evaluation.figures.get(self._wanted.name)
        if not self._wanted.better(self._wanted.of(evaluation.figures), best):
            return False
        try:
            make_directory(self.path.parent)
        except OSError as error:
            raise KvpsError(f"{self.path.parent}: {error.strerror}") from None
        facts = {
            "format": "pt",  # what libraries that load models of PyTorch ask for
            "job": self._job,
            "id": self._id,
            "version": str(evaluation.version),
            "figures": figures_json(evaluation.figures),
            "by": evaluation.by,
            "at_ms": str(evaluation.at_ms),
            "best": str(self._wanted),
        }
        write_tensors(_WHAT, self.path, dict(weights), facts)
        self.evaluation = evaluation
        return True


def best_of(path: Path) -> Evaluation | None:
    """Return the evaluation of the version that a file has; None without a file. Raises UsageError for another file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            facts = Fields(file.metadata(), str(path)).as_dict()
        return Evaluation.stored(facts)
    except (SafetensorError, OSError, CorruptData) as error:
        raise UsageError(f"{path} is no best version that kvps has kept ({error}): move it away") from None
