"""A parameter server on torch.distributed.rpc: trainers send gradients; after the last one, all get the weights.

As in PyTorch's tutorial on batched RPC, one asynchronous function returns the round's future. With `transport` "tcp"
TensorPipe may use only sockets; otherwise it uses shared memory and copies from process to process.
"""

from __future__ import annotations

import os
import threading

from lockstep import LR, Crowd, answer, free_port, options, right, sizes

try:
    import torch
    from torch.distributed import rpc

    asynchronous = rpc.functions.async_execution
except ImportError as error:
    raise SystemExit(f"torch without rpc: {error}") from None


class Server:
    """The weights, and the sum of the round's gradients so far."""

    def __init__(self, items, workers):
        self.weights = [torch.zeros(size) for size in items]
        self.workers = workers
        self.lock = threading.Lock()
        self.begin()

    def begin(self):
        self.total, self.arrived, self.round = None, 0, torch.futures.Future()

    def exchange(self, grads):
        with self.lock:
            round_ = self.round
            self.arrived += 1
            if self.total is None:
                self.total = grads
            else:
                torch._foreach_add_(self.total, grads)
            if self.arrived == self.workers:
                # Into new arrays: the weights of the round before may still be on their way.
                self.weights = torch._foreach_add(self.weights, self.total, alpha=-LR / self.workers)
                self.begin()
                round_.set_result(self.weights)
        return round_


SERVER = []


def open_server(items, workers):
    SERVER[:] = [Server(items, workers)]


@asynchronous
def exchange(grads):
    return SERVER[0].exchange(grads)


def work(number, worker, asked, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    only = {"_transports": ["uv"], "_channels": ["basic"]} if asked["transport"] == "tcp" else {}
    backend = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=120, **only)
    name = f"w{number - 1}" if number else "server"
    rpc.init_rpc(name, rank=number, world_size=asked["workers"] + 1, rpc_backend_options=backend)
    if number:
        items, weights = sizes(asked["nbytes"], asked["tensors"]), []
        if number == 1:
            rpc.rpc_sync("server", open_server, args=(items, asked["workers"]))
        grads = [torch.full((size,), float(number)) for size in items]

        def step():
            weights[:] = rpc.rpc_sync("server", exchange, args=(grads,))

        worker.obey(
            step, lambda rounds: right([float(w[i]) for w in weights for i in (0, -1)], asked["workers"], rounds)
        )
    rpc.shutdown()


if __name__ == "__main__":
    asked = options()
    crowd = Crowd(work, asked["workers"] + 1, asked["workers"], asked, free_port())
    answer(crowd.rounds, crowd.check)
