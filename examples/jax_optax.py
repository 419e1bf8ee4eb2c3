"""The digits with JAX and optax; parameters are nested lists and dicts.

kvps run -w 2 -- python jax_optax.py            # optax clips gradients, the aggregator steps
kvps run -w 2 -- python jax_optax.py local      # optax takes 4 steps between two pulls, workers are averaged

Alone it runs too.
"""

import sys
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits

import kvps
import kvps.jax

STEPS, BATCH, LOCAL_STEPS = 60, 32, 4
pixels, labels = load_digits(return_X_y=True)
x, y = jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(labels)


def make_params() -> Any:
    rng = np.random.default_rng(1)
    weights = [rng.normal(0, n**-0.5, (n, m)).astype(np.float32) for n, m in ((64, 64), (64, 10))]
    layers = [{"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for w in weights]
    return {"layers": layers, "scale": jnp.ones(())}


def loss_of(params: Any, rows: Any) -> Any:
    hidden = x[rows]
    for layer in params["layers"]:
        hidden = jnp.tanh(hidden) @ layer["w"] + layer["b"]
    return optax.softmax_cross_entropy_with_integer_labels(hidden * params["scale"], y[rows]).mean()


clip = optax.clip_by_global_norm(1.0)
adamw = optax.adamw(1e-2, weight_decay=0.01)


@jax.jit
def clipped_gradient(params: Any, rows: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    return loss, clip.update(grads, clip.init(grads))[0]


@jax.jit
def local_step(params: Any, state: Any, rows: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, rows)
    updates, state = adamw.update(grads, state, params)
    return loss, optax.apply_updates(params, updates), state


def rows_of(rank: int, number: int) -> Any:
    return np.random.default_rng((rank, number)).choice(len(labels), BATCH, replace=False)


def train(job: kvps.Job, worker_id: str, local: bool) -> None:
    with kvps.jax.join(job, make_params(), worker_id) as worker:
        state = adamw.init(make_params())
        while worker.session.clock < (STEPS // LOCAL_STEPS if local else STEPS):
            params = pulled = worker.pull()
            if not local:
                loss, grads = clipped_gradient(params, rows_of(worker.session.rank, worker.session.clock))
            else:
                for step in range(LOCAL_STEPS):
                    rows = rows_of(worker.session.rank, LOCAL_STEPS * worker.session.clock + step)
                    loss, params, state = local_step(params, state, rows)
                grads = jax.tree.map(jnp.subtract, pulled, params)  # how far it came
            worker.step(grads, loss)


def main(local: bool) -> None:
    with kvps.from_env() as me:
        optimizer = kvps.SGD(lr=1.0) if local else kvps.AdamW(lr=1e-2, weight_decay=0.01)
        job = me.create_job(kvps.jax.parameters(make_params()), optimizer=optimizer)
        train(job, me.id, local)
        if me.rank == 0:
            job.await_finished()
            version, params = kvps.jax.load(job, make_params())
            print(f"loss {loss_of(params, slice(None)):.3f}, version {version}")


if __name__ == "__main__":
    main("local" in sys.argv)
