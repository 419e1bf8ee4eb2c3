"""Training of PyTorch models: weights are pulled into a model's parameters, gradients pushed from `.grad`.

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = store.create_job("mine", kvps.torch.parameters(model), optimizer=kvps.torch.optimizer(model, sgd), workers=2)
    with kvps.torch.join(job, model, "w0") as worker:
        for x, y in batches[worker.session.clock:]:  # a worker that comes back does its own next batch
            worker.pull()                   # weights into the model, as soon as the bound admits its next round
            loss = loss_of(model(x), y)
            loss.backward()
            worker.step(loss)               # gradients to the aggregator, which steps

Only parameters that require a gradient are sent, tied ones once. A model may be in bfloat16 or float16, as a whole or
in parts; the job's weights are float32. Each worker keeps its own buffers (BatchNorm's running statistics), or a job of
``parameters(model, buffers="average")`` or ``"rank0"`` has them too.
"""

from kvps.errors import install as _install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(f"kvps.torch needs PyTorch, which is not installed: {_install('torch')}") from None

from kvps.torch.batches import Batches
from kvps.torch.distributed import Optimizer
from kvps.torch.evaluation import evaluates
from kvps.torch.loading import Loaded, load
from kvps.torch.model import parameters
from kvps.torch.optimizer import optimizer
from kvps.torch.session import TorchSession, join

__all__ = ["Batches", "Loaded", "Optimizer", "TorchSession", "evaluates", "join", "load", "optimizer", "parameters"]
