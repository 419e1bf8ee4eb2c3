"""A small GPT-2 of Hugging Face's transformers learns to count on by GRPO: actors call generate, a function rewards
what they wrote, and one learner trains. Ten lines are kvps's.

python small_lm.py                   # a learner and 2 actors, on a server of your own
python small_lm.py learn             # the parts by hand, on any hosts: one learner
python small_lm.py act               # and actors

A prompt is three digits that are equally far apart, such as 4 7 0; the answer that counts has the next five, 3 6 9 2 5.
The first weights are random; a short training on right answers brings the reward to some 0.3, GRPO does the rest.
"""

import argparse
import os
import subprocess
import sys
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import kvps

ACTORS, GROUPS, GROUP, EPOCHS = 2, 8, 8, 10  # groups of a version, answers of a group
START, SHOWN, ANSWER = 10, 3, 5  # the token that begins a prompt; digits of a prompt and of an answer
PROMPTS = [[START, *((first + n * step) % 10 for n in range(SHOWN))] for first in range(10) for step in range(10)]
CLIP, STEPS, WARM_UP = 0.2, 4, 150  # steps of a version, and before the first one

torch.set_num_threads(1)


def right_answer(prompt):
    first, second, *_ = prompt[1:]
    return [(first + n * (second - first)) % 10 for n in range(SHOWN, SHOWN + ANSWER)]


def reward_of(prompt, answer):
    """The share of digits that are right."""
    return sum(a == b for a, b in zip(answer, right_answer(prompt), strict=True)) / ANSWER


def make_model():
    """Return a model of 400,256 parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": START + 1, "n_positions": 16, "n_embd": 128, "n_layer": 2, "n_head": 4}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=START, eos_token_id=None))


def logps_of(model, tokens):
    """Log-probabilities (n, ANSWER) of the answers in tokens (n, 1 + SHOWN + ANSWER)."""
    logits = model(tokens[:, :-1]).logits[:, SHOWN:]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1 + SHOWN :, None])[..., 0]


# -- actors -----------------------------------------------------------------------------------------------------------


def act(job):
    model = make_model().eval()
    with kvps.connect() as store, store.watch(job, wait=600) as policy:
        while (unit := policy.next_unit()) is not None:
            policy.update(model)
            prompt = PROMPTS[unit % len(PROMPTS)]
            for answer in answers_to(model, prompt):
                policy.rollouts.put(answer, version=policy.version, unit=unit)


def answers_to(model, prompt):
    """Return a group of answers: items of experience."""
    with torch.no_grad():
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": ANSWER, "num_return_sequences": GROUP}
        prompts = torch.tensor([prompt])
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=START, **settings)
        logps = logps_of(model, tokens)
    rewards = [reward_of(prompt, answer[len(prompt) :].tolist()) for answer in tokens]
    return [{"tokens": tokens[n].numpy(), "logps": logps[n].numpy(), "reward": float(rewards[n])} for n in range(GROUP)]


# -- the learner ------------------------------------------------------------------------------------------------------


def learn(job, epochs):
    model = make_model()
    warm_up(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    adamw = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    began, before = time.monotonic(), mean_reward(model)
    print(f"before GRPO: mean reward {before:.3f}", flush=True)
    settings = kvps.Rollouts(prompts=len(PROMPTS), epochs=epochs, group=GROUP, max_staleness=1)
    with kvps.connect() as store, store.publisher(job, model, dtype="bf16", rollouts=settings) as policy:
        while items := policy.rollouts.take(groups=GROUPS):
            useful = []
            for group in (items[n : n + GROUP] for n in range(0, len(items), GROUP)):
                if len({item.data["reward"] for item in group}) > 1:
                    useful += group
                else:
                    policy.rollouts.reject(group, "no advantage")
            if useful:
                loss = train(model, adamw, [item.data for item in useful])
                version = policy.publish(model, trained=useful, loss=loss)
                mean = sum(item.data["reward"] for item in items) / len(items)
                print(f"version {version}: {len(useful)} answers, mean reward of all {mean:.3f}", flush=True)
    print(f"after GRPO: mean reward {mean_reward(model):.3f}, {time.monotonic() - began:.1f} s")


def train(model, adamw, items):
    """Take some steps of GRPO (Shao et al., 2024) on whole groups; return the loss of the first one."""
    tokens, old = (torch.from_numpy(np.stack([item[name] for item in items])) for name in ("tokens", "logps"))
    rewards = torch.tensor([item["reward"] for item in items]).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages, first = advantages.view(-1, 1), None
    for _ in range(STEPS):
        ratio = (logps_of(model, tokens) - old).exp()  # the importance weight: actors had older weights, in bfloat16
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        step(model, adamw, loss)
        first = loss.item() if first is None else first
    return first


def warm_up(model, adamw):
    """Train on right answers for a short while."""
    everything = torch.tensor([prompt + right_answer(prompt) for prompt in PROMPTS])
    for _ in range(WARM_UP):
        tokens = everything[torch.randint(len(everything), (32,))]
        logits = model(tokens[:, :-1]).logits[:, SHOWN:]
        step(model, adamw, cross_entropy(logits.flatten(0, 1), tokens[:, 1 + SHOWN :].flatten()))


def step(model, adamw, loss):
    adamw.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()


def mean_reward(model):
    """Return the mean reward of a group of answers to each prompt."""
    answers = [answer["reward"] for prompt in PROMPTS for answer in answers_to(model, prompt)]
    return sum(answers) / len(answers)


# -- all processes ----------------------------------------------------------------------------------------------------


def run(job, epochs):
    """Run a learner and actors, and return the learner's exit code."""
    settings = [f"--job={job}", f"--epochs={epochs}"]
    running = [subprocess.Popen([sys.executable, __file__, part, *settings]) for part in ["learn", *["act"] * ACTORS]]
    try:
        return max(abs(process.wait()) for process in running)
    finally:
        for process in running:
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["learn", "act"])
    parser.add_argument("--job", default="", help="its name, for the parts by hand")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="how often each prompt is answered")
    options = parser.parse_args()
    job = options.job or "small-lm"
    if options.part == "act":
        act(job)
    elif options.part == "learn":
        learn(job, options.epochs)
    else:
        sys.exit(run(options.job or f"small-lm-{os.getpid()}", options.epochs))


if __name__ == "__main__":
    main()
