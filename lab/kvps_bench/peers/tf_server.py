"""TensorFlow's ParameterServerStrategy with one server, gRPC over TCP.

The strategy is asynchronous, so a round is two joins of its coordinator: all workers push, then all pull. A free worker
takes the next closure, so it is likely, not certain, that each worker does one of each. The sum is right in any case.
"""

from __future__ import annotations

import multiprocessing
import os

from lockstep import LR, answer, free_port, options, right, sizes, timed

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "GRPC_FAIL_FAST": "use_caller"}


def serve(kind, index, cluster):
    import tensorflow as tf

    threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=kind, task_index=index, protocol="grpc", config=threads
    ).join()


def open_cluster(workers):
    """Start the server and the workers as processes; return TensorFlow, the strategy and its coordinator."""
    places = [f"127.0.0.1:{free_port()}" for _ in range(workers + 2)]
    cluster = {"chief": places[:1], "ps": places[1:2], "worker": places[2:]}
    spawning = multiprocessing.get_context("spawn")
    for kind, index in [("ps", 0), *(("worker", i) for i in range(workers))]:
        spawning.Process(target=serve, args=(kind, index, cluster), daemon=True).start()
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return tf, strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


if __name__ == "__main__":
    asked = options()
    workers, items = asked["workers"], sizes(asked["nbytes"], asked["tensors"])
    tf, strategy, coordinator = open_cluster(workers)
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([size])) for size in items]

    @tf.function
    def push(gradient):
        for weight, size in zip(weights, items):
            weight.assign_sub(tf.fill([size], gradient * (LR / workers)), read_value=False)
        return tf.constant(0)

    @tf.function
    def pull():
        return tf.add_n([tf.reduce_sum(weight.read_value()) for weight in weights])

    done = [0]

    def step():
        for rank in range(workers):
            coordinator.schedule(push, args=(tf.constant(float(rank + 1)),))
        coordinator.join()
        for _ in range(workers):
            coordinator.schedule(pull)
        coordinator.join()
        done[0] += 1

    def check():
        return right([float(w.read_value()[i]) for w in weights for i in (0, -1)], workers, done[0])

    answer(lambda number: timed(number, step), check)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # its threads wait for servers that are gone
