"""torch.distributed all_reduce over gloo, TCP: gradients in buckets of 25 MiB as DistributedDataParallel sends them."""

from __future__ import annotations

import os

from lockstep import LR, Crowd, answer, free_port, options, right, sizes, timed

BUCKET_ITEMS = (25 << 20) // 4


def buckets(items):
    """Group neighbouring arrays, as many as fit into a bucket."""
    out = [[]]
    for size in items:
        if out[-1] and sum(out[-1]) + size > BUCKET_ITEMS:
            out.append([])
        out[-1].append(size)
    return out


def joined(asked, rank, address, port, interface):
    """Join the others; return a function that does a round, and one that checks the weights after so many rounds."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
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

    return step, lambda rounds: right([float(w[i]) for w in weights for i in (0, -1)], asked["workers"], rounds)


def end():
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def work(rank, worker, asked, port):
    worker.obey(*joined(asked, rank, "127.0.0.1", port, "lo"))
    end()


def work_on_a_host(asked):
    """Be the rank that `asked` names, with the others on other hosts: all are asked for rounds at the same time."""
    step, check = joined(asked, asked["rank"], asked["address"], asked["port"], asked["interface"])
    done = []

    def rounds(number):
        done.append(number)
        return timed(number, step)

    answer(rounds, lambda: check(sum(done)))
    end()


if __name__ == "__main__":
    asked = options()
    if "rank" in asked:
        work_on_a_host(asked)
    else:
        crowd = Crowd(work, asked["workers"], asked["workers"], asked, free_port())
        answer(crowd.rounds, crowd.check)
