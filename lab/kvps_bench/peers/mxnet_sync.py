"""MXNet's KVStore `dist_sync`: a scheduler, a server that holds the optimizer, workers that push and pull; TCP."""

from __future__ import annotations

import os

from lockstep import LR, Crowd, answer, free_port, options, right, sizes


def work(number, worker, asked, port):
    role = ("scheduler", "server")[number] if number < 2 else "worker"
    os.environ |= {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(asked["workers"]),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "MXNET_CPU_WORKER_NTHREADS": "1",
        "MXNET_KVSTORE_REDUCTION_NTHREADS": "1",
    }
    import mxnet as mx  # in the scheduler and the server, this import never returns

    store = mx.kv.create("dist_sync")
    if store.rank == 0:
        store.set_optimizer(mx.optimizer.SGD(learning_rate=LR, rescale_grad=1 / asked["workers"], wd=0.0))
    items = sizes(asked["nbytes"], asked["tensors"])
    names = [str(i) for i in range(len(items))]
    weights = [mx.nd.zeros((size,)) for size in items]
    grads = [mx.nd.full((size,), store.rank + 1) for size in items]
    store.init(names, weights)
    mx.nd.waitall()

    def step():
        store.push(names, grads)
        store.pull(names, out=weights)
        for weight in weights:
            weight.wait_to_read()

    def refill():
        # A pull overwrites the memory that the push was sent from. A backward pass would write the gradient again.
        for grad in grads:
            grad[:] = store.rank + 1
        mx.nd.waitall()

    def check(rounds):
        return right([float(w[i].asscalar()) for w in weights for i in (0, w.size - 1)], asked["workers"], rounds)

    worker.obey(step, check, refill)
    store._barrier()


if __name__ == "__main__":
    asked = options()
    crowd = Crowd(work, asked["workers"] + 2, asked["workers"], asked, free_port())
    answer(crowd.rounds, crowd.check)
