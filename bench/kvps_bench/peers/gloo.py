"""torch.distributed all_reduce over gloo, TCP: gradients in buckets of 25 MiB as DistributedDataParallel sends them."""

from __future__ import annotations

import os

from lockstep import LR, Crowd, answer, free_port, options, right, sizes

BUCKET_ITEMS = (25 << 20) // 4


def buckets(items):
    """Group neighbouring arrays, as many as fit into a bucket."""
    out = [[]]
    for size in items:
        if out[-1] and sum(out[-1]) + size > BUCKET_ITEMS:
            out.append([])
        out[-1].append(size)
    return out


def work(rank, worker, asked, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=asked["workers"])
    parts = buckets(sizes(asked["nbytes"], asked["tensors"]))
    flat = [torch.full((sum(part),), float(rank + 1)) for part in parts]
    grads = [grad for bucket, part in zip(flat, parts) for grad in bucket.split(part)]
    weights = [torch.zeros_like(grad) for grad in grads]

    def step():
        waiting = [dist.all_reduce(bucket, async_op=True) for bucket in flat]
        for work, bucket in zip(waiting, flat):
            work.wait()
            bucket /= asked["workers"]  # the mean; so is the next round's mean of these, and no gradient needs a refill
        torch._foreach_add_(weights, grads, alpha=-LR)

    worker.obey(step, lambda rounds: right([float(w[i]) for w in weights for i in (0, -1)], asked["workers"], rounds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    asked = options()
    crowd = Crowd(work, asked["workers"], asked["workers"], asked, free_port())
    answer(crowd.rounds, crowd.check)
