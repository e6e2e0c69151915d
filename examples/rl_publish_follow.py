"""Reinforcement learning: a trainer publishes its policy after every step, a sampler follows.

    python examples/rl_publish_follow.py

Kill it (`pkill -9 -f examples/rl_publish_follow.py`) and run it again: the trainer resumes. The
agent wins by moving to the place that a hidden table names. On a cluster, the two processes are
jobs of their own, with gs://bucket/run in place of runs/rl. To begin anew, remove runs/rl.
Needs `pip install 'shardckpt[torch] @ git+https://github.com/shardckpt/shardckpt'`.
"""

import multiprocessing

import torch
from torch import nn

import shardckpt

RUN, STEPS, BATCH, PLACES = "runs/rl", 120, 1024, 32
GOAL = torch.randperm(PLACES, generator=torch.Generator().manual_seed(7))


def new_policy() -> nn.Module:
    """A policy in float32; versions are published in bfloat16."""
    torch.manual_seed(0)
    layers = nn.Embedding(PLACES, 128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, PLACES)
    return nn.Sequential(*layers)


def play(policy: nn.Module, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Places, moves drawn from the policy, and rewards."""
    places = torch.randint(PLACES, (BATCH,), generator=rng)
    with torch.no_grad():
        moves = torch.multinomial(policy(places).float().softmax(-1), 1, generator=rng)[:, 0]
    return places, moves, (moves == GOAL[places]).float()


def train() -> None:
    """Policy gradient on batches that the policy plays itself."""
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    state = shardckpt.train_state(policy=policy, optimizer=optimizer, step=0, rng=False)
    publisher = shardckpt.Publisher(f"{RUN}/policy", dtype="bfloat16", anchor_every=20, keep=20)
    with shardckpt.CheckpointManager(f"{RUN}/training", every=20, keep=2) as manager, publisher:
        if manager.restore(state):
            print(f"trainer: resumed from step {state.step}", flush=True)
        for step in range(state.step + 1, STEPS + 1):
            places, moves, rewards = play(policy, torch.Generator().manual_seed(step))
            chosen = policy(places).log_softmax(-1).gather(1, moves[:, None])[:, 0]
            loss = -(chosen * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step = step
            manager.save(step, state)
            publisher.publish(step, {"policy": policy.state_dict()})  # returns after copying
            if step % 20 == 0:
                print(f"trainer: step {step} wins {rewards.mean():.2f}", flush=True)


def sample() -> None:
    """Play with each newest version."""
    policy = new_policy().to(torch.bfloat16)
    for version in shardckpt.follow(f"{RUN}/policy", like={"policy": policy.state_dict()}):
        version.prepare()  # an engine goes on generating meanwhile
        version.apply()  # ... and pauses for this copy
        version.prove()
        _, _, rewards = play(policy, torch.Generator().manual_seed(version.step))
        totals = version.checkpoint.record.totals
        stored = f"{totals['stored_bytes'] / totals['bytes']:.0%} of the weights were stored"
        print(f"sampler: version {version.step} wins {rewards.mean():.2f}, {stored}", flush=True)
        if version.step == STEPS:
            break


if __name__ == "__main__":
    sampler = multiprocessing.get_context("spawn").Process(target=sample, daemon=True)
    sampler.start()
    train()
    sampler.join(60)
