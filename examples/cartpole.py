"""CartPole of gymnasium, by one learner and actors: PPO, with importance weights. Twelve lines are kvps's.

python cartpole.py                   # a learner and 4 actors, on a server of your own
python cartpole.py --kills           # the same, and every 3 s an actor is killed and started anew, once the learner
python cartpole.py --single          # the same algorithm in one process, without kvps
python cartpole.py --compare         # both ways with ten seeds, and the median of how much longer actors take
python cartpole.py learn             # the parts by hand, on any hosts: one learner
python cartpole.py act --actor 0     # and so many actors, each with another number

It needs torch and gymnasium; an actor needs no torch. Solved is a mean return of 475 in the last 100 episodes.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import deque

import gymnasium
import numpy as np

import kvps

SOLVED, SEEDS = 475.0, range(10)
ACTORS, STEPS, BATCH = 4, 128, 8  # steps of a fragment, and fragments of a version
GAMMA, LAMBDA, CLIP, EPOCHS, PARTS = 0.98, 0.9, 0.2, 10, 2
CAPACITY = 32 * BATCH  # fragments that may wait
KILL_S, LEARNER = 3.0, 3  # between two kills, and which of them is that of the learner

# -- actors -----------------------------------------------------------------------------------------------------------


class Player:
    """Plays on and on, a fragment at a time."""

    def __init__(self, seed, actor):
        self._rng = np.random.default_rng((seed, actor))
        self._env = gymnasium.make("CartPole-v1", disable_env_checker=True)
        self._seen, _ = self._env.reset(seed=1000 * seed + actor)
        self._return = 0.0

    def fragment(self, weights):
        """Play STEPS steps with the policy of these weights: an item of experience.

        seen, after (STEPS, 4) are what was seen before and after each step, actions and logps (STEPS,) what was done
        and its log-probability, dead and ended (STEPS,) whether the pole fell, and whether the episode ended with
        that or with its 500th step. returns are those of the episodes that ended.
        """
        w = {name: np.asarray(array) for name, array in weights.items() if name.startswith("policy")}
        seen, after, actions, logps, dead, ended, returns = [], [], [], [], [], [], []
        for _ in range(STEPS):
            hidden = np.tanh(w["policy.0.weight"] @ self._seen + w["policy.0.bias"])
            hidden = np.tanh(w["policy.2.weight"] @ hidden + w["policy.2.bias"])
            left, right = (w["policy.4.weight"] @ hidden + w["policy.4.bias"]).tolist()
            action = int(self._rng.random() < 1 / (1 + np.exp(left - right)))
            seen.append(self._seen)
            actions.append(action)
            logps.append(-np.logaddexp(0.0, left - right if action else right - left))
            self._seen, reward, fell, cut, _ = self._env.step(action)
            after.append(self._seen)
            dead.append(fell)
            ended.append(fell or cut)
            self._return += float(reward)
            if fell or cut:
                returns.append(self._return)
                self._return = 0.0
                self._seen, _ = self._env.reset()
        return {
            "seen": np.array(seen, np.float32),
            "after": np.array(after, np.float32),
            "actions": np.array(actions),
            "logps": np.array(logps, np.float32),
            "dead": np.array(dead),
            "ended": np.array(ended),
            "returns": np.array(returns, np.float32),
        }


def act(job, seed, actor):
    os.nice(5)  # actors are ahead anyway: on few processors the learner comes first
    player = Player(seed, actor)
    with kvps.connect() as store, store.watch(job, wait=600) as policy:
        while policy.running:
            policy.update()
            if policy.rollouts.room():
                policy.rollouts.put(player.fragment(policy.arrays), version=policy.version)
            else:
                policy.update(wait=1.0)  # until there is a newer version


# -- the learner ------------------------------------------------------------------------------------------------------


class Learner:
    """PPO: a policy and a value, each of two layers."""

    def __init__(self, seed):
        import torch  # an actor starts faster without it

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._torch, nn = torch, torch.nn

        def layers(outputs):
            return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

        self.model = nn.ModuleDict({"policy": layers(2), "value": layers(1)})
        with torch.no_grad():
            self.model["policy"][-1].weight.mul_(0.01)
        self._adam = torch.optim.Adam(self.model.parameters(), lr=2e-3, eps=1e-5, fused=True)
        self._returns, self._steps, self._began = deque(maxlen=100), 0, time.monotonic()

    @property
    def solved(self):
        return len(self._returns) == 100 and float(np.mean(self._returns)) >= SOLVED

    def train(self, items):
        """Train on fragments, and return the loss of the policy in the first of all epochs."""
        torch, first = self._torch, None
        each = {name: torch.from_numpy(np.stack([i[name] for i in items])) for name in items[0] if name != "returns"}
        advantages, targets = self._advantages(each)
        flat = {name: array.flatten(0, 1) for name, array in each.items()}
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(advantages)).chunk(PARTS):
                logps = self.model["policy"](flat["seen"][rows]).log_softmax(1)
                logp = logps.gather(1, flat["actions"][rows, None])[:, 0]
                ratio = (logp - flat["logps"][rows]).exp()  # the importance weight: however old the item is
                gain = torch.min(ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows]).mean()
                value = self.model["value"](flat["seen"][rows])[:, 0]
                self._adam.zero_grad()
                (0.5 * (value - targets[rows]).square().mean() - gain).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self._adam.step()
                first = -gain.item() if first is None else first
        self._steps += len(advantages)
        self._returns.extend(float(value) for item in items for value in item["returns"])
        return first

    def _advantages(self, each):
        """Return advantages and targets of the value, (fragments * STEPS,), by generalized advantage estimation
        (Schulman et al., 2016)."""
        torch = self._torch
        with torch.no_grad():
            now, then = (self.model["value"](each[name])[..., 0] for name in ("seen", "after"))
            deltas = 1 + GAMMA * then * ~each["dead"] - now
            advantages, last = torch.zeros_like(deltas), torch.zeros(len(deltas))
            for step in reversed(range(STEPS)):
                last = deltas[:, step] + GAMMA * LAMBDA * last * ~each["ended"][:, step]
                advantages[:, step] = last
        return advantages.flatten(), (advantages + now).flatten()

    def state(self):
        """What another process needs to go on with this one's training, beside the weights."""
        adam = {f"{n}/{key}": v for n, of in self._adam.state_dict()["state"].items() for key, v in of.items()}
        return adam | {"returns": np.array(self._returns, np.float32), "steps": self._steps}

    def go_on(self, state):
        self._returns.extend(state.pop("returns").tolist())
        self._steps = state.pop("steps")
        adam = {n: {} for n in range(len(list(self.model.parameters())))}
        for name, array in state.items():
            n, _, key = name.partition("/")
            adam[int(n)][key] = self._torch.from_numpy(np.array(array))
        self._adam.load_state_dict(self._adam.state_dict() | {"state": adam})

    def say(self, version, staleness=0.0):
        if version % 10 == 0 or self.solved:
            mean, seconds = np.mean(self._returns or [0.0]), time.monotonic() - self._began
            print(f"version {version}: {self._steps} steps, mean return {mean:.1f}, ", end="")
            print(f"staleness {staleness:.1f}, {seconds:.1f} s", flush=True)


def learn(job, seed, max_staleness, versions):
    learner = Learner(seed)
    rollouts = kvps.Rollouts(max_staleness=max_staleness, capacity=CAPACITY)
    with kvps.connect() as store, store.publisher(job, learner.model, rollouts=rollouts, takeover=True) as policy:
        if version := policy.load(learner.model, state := {}):  # an earlier learner was killed
            learner.go_on(state)
        while not learner.solved and version < versions and (items := policy.rollouts.take(BATCH)):
            loss = learner.train([item.data for item in items])
            version = policy.publish(learner.model, trained=items, state=learner.state(), loss=loss)
            learner.say(version, np.mean([version - 1 - item.version for item in items]))


def single(seed, versions):
    """The same in one process: the actors play in turn."""
    learner, players = Learner(seed), [Player(seed, actor) for actor in range(ACTORS)]
    for version in range(1, versions + 1):
        weights = {name: array.numpy() for name, array in learner.model.state_dict().items()}
        learner.train([players[n % ACTORS].fragment(weights) for n in range(BATCH)])
        learner.say(version)
        if learner.solved:
            break


# -- all processes ----------------------------------------------------------------------------------------------------


def run(options):
    """Run a learner and actors, and kill some of them if that is asked for. Return the learner's exit code."""
    settings = [f"--job={options.job or f'cartpole-{os.getpid()}'}", f"--seed={options.seed}"]
    settings += [f"--max-staleness={options.max_staleness}", f"--versions={options.versions}"]
    parts = [["learn"], *(["act", f"--actor={n}"] for n in range(ACTORS))]
    running, killed, at = [start(part + settings) for part in parts], 0, time.monotonic() + KILL_S
    try:
        while running[0].poll() is None:
            time.sleep(0.05)
            if options.kills and time.monotonic() > at:
                killed, at = killed + 1, time.monotonic() + KILL_S
                n = 0 if killed == LEARNER else 1 + killed % ACTORS
                running[n].kill()
                running[n].wait()
                running[n] = start(parts[n] + settings)
        for actor in running[1:]:
            actor.wait(None if killed == 0 else 5)  # one that was just started may have come too late for the job
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in running:
            process.kill()
    if killed:
        print(f"{killed} processes were killed")
    return running[0].wait()


def compare():
    """Solve with each seed both ways in turns, and print how long each command took."""
    ratios = []
    for seed in SEEDS:
        took = {}
        for way in (["--single"], []) if seed % 2 == 0 else ([], ["--single"]):
            began = time.monotonic()
            with start([*way, f"--seed={seed}"], stdout=subprocess.PIPE, text=True) as process:
                *_, last = process.stdout
            took[bool(way)] = time.monotonic() - began
            print(
                f"seed {seed}, {'one process' if way else 'actors'}: {took[bool(way)]:.1f} s; {last}",
                end="",
                flush=True,
            )
        ratios.append(took[False] / took[True])
    print(f"ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}, median {np.median(ratios):.2f}")


def start(arguments, **options):
    return subprocess.Popen([sys.executable, __file__, *arguments], **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["learn", "act"])
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--job", default="", help="its name, for the parts by hand")
    parser.add_argument("--seed", type=int, default=SEEDS[0])
    parser.add_argument("--actor", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--versions", type=int, default=2000, help="the most")
    options = parser.parse_args()
    job = options.job or "cartpole"
    if options.compare:
        compare()
    elif options.single:
        single(options.seed, options.versions)
    elif options.part == "act":
        act(job, options.seed, options.actor)
    elif options.part == "learn":
        learn(job, options.seed, options.max_staleness, options.versions)
    else:
        sys.exit(run(options))


if __name__ == "__main__":
    main()
