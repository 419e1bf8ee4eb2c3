"""Training of JAX models: parameters and gradients are pytrees, nested in any way, and come back in the same form.

    job = store.create_job("mine", kvps.jax.parameters(params), optimizer=kvps.AdamW(lr=1e-3), workers=2)
    with kvps.jax.join(job, params) as worker:
        for batch in batches[worker.session.clock:]:  # a worker that comes back does its own next batch
            params = worker.pull()              # as soon as the bound admits the next round
            loss, grads = value_and_grad(params, batch)
            worker.step(grads, loss)            # gradients to the aggregator, which steps

The aggregator steps by a rule of kvps, which has the names, the settings and the defaults of PyTorch. Transformations
of optax may change gradients before `step`, or take local steps between two pulls: see docs/jax.md.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvps.arrays.layout import DTYPE, Array
from kvps.errors import LayoutMismatch
from kvps.job import Job
from kvps.session.session import Session

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError("kvps.jax needs JAX, which is not installed: pip install jax") from None

import numpy as np
from jax import numpy as jnp

__all__ = ["JaxSession", "join", "load", "parameters"]
_EXACT = ("float32", "bfloat16", "float16")
"""The dtypes that float32 holds exactly."""


def parameters(tree: Any) -> dict[str, Array]:
    """Return what a job of this model begins with: name -> float32 array, of each leaf of the pytree `tree`. A name is
    the path to its leaf, as "layers/0/bias". Raises LayoutMismatch for a leaf that is no array of float32, bfloat16 or
    float16, and for two leaves of the same name."""
    named: dict[str, Array] = {}
    for name, leaf in _leaves(tree):
        dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
        if dtype not in _EXACT:
            raise LayoutMismatch(
                f"leaf {name!r} is {dtype}: a job's weights are float32, which a model may hold in float32, bfloat16 "
                f"or float16; leave other leaves out"
            )
        if name in named:
            raise LayoutMismatch(f"two leaves are called {name!r}: rename a key")
        named[name] = np.asarray(leaf, DTYPE)
    return named


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the name of each leaf, and the leaf."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]


def join(
    job: Job, tree: Any, worker: str | None = None, *, takeover: bool = False, prefetch: bool = False
) -> JaxSession:
    """Become a worker that trains a model with the form of `tree`, as `Job.join` does. Raises LayoutMismatch if the
    job's parameters are others, and what `Job.join` raises."""
    job.layout.hosted(parameters(tree), "parameter")
    return JaxSession(job.join(worker, takeover=takeover, prefetch=prefetch), tree)


def load(job: Job, tree: Any) -> tuple[int, Any]:
    """Return the newest version of a job, and its weights in the form of `tree`. Blocks no worker. Raises
    LayoutMismatch, JobNotFound."""
    job.layout.hosted(parameters(tree), "parameter")
    version, weights = job.snapshot()
    return version, _in_form(tree, weights)


def _in_form(tree: Any, weights: dict[str, Array]) -> Any:
    """Return copies of the weights as a pytree, in the dtype and on the devices of its leaves: a worker's next pull
    writes where these are."""
    leaves = []
    for name, leaf in _leaves(tree):
        array = jnp.array(weights[name], leaf.dtype, copy=True)
        leaves.append(jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), leaves)


class JaxSession:
    """A worker's session and the form of its model. `join` returns one; it belongs to the thread that joined.

    session   the worker's session: rank, round, clock, version, and next_unit() for units
    """

    def __init__(self, session: Session, tree: Any) -> None:
        self.session = session
        self._tree = tree

    def pull(self) -> Any:
        """Begin a round as soon as the bound admits it, and return the newest weights. Raises what `Session.pull`
        raises."""
        return _in_form(self._tree, self.session.pull())

    def step(self, grads: Any, loss: Any = None, weight: int | None = None) -> int:
        """Push a gradient, a pytree of the same form, by which the aggregator steps; return the clock that acknowledges
        it. `loss` and `weight` are as for `Session.push`. Raises what that raises."""
        return self.session.push(parameters(grads), loss, weight)

    def leave(self, finished: bool = True) -> None:
        """Leave as `Session.leave` does; the end of a with block does this too."""
        self.session.leave(finished)

    def __enter__(self) -> JaxSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.session.__exit__(kind, error, trace)
