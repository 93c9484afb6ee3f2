"""Train the demo policy: behaviour cloning on the scripted expert, then corrections.

    python -m flashrt_ros.demo.train [--seed 0] [--out sorting.onnx]

Round 0 lets the expert work while its commands are disturbed; every later round lets the policy
work and asks the expert what it would have done (DAgger). Needs torch (any CPU build of 2.6 or
later); minutes on two cores. The node, the demo and the study need the ONNX file only.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
import os
from pathlib import Path
import tempfile
import time

import numpy as np
from numpy.typing import NDArray

try:
    import torch
    from torch import nn
except ImportError:
    raise SystemExit("training needs torch: pip install 'flashrt_ros[torch]'") from None

from flashrt_ros.demo import rollout
from flashrt_ros.demo.arm import Cell, Task
from flashrt_ros.demo.expert import Expert, look
from flashrt_ros.demo.export import KEEP, KEEP_BIAS, export, fine_features
from flashrt_ros.demo.rollout import (
    ACTION_OFFSET,
    ACTION_SCALE,
    ACTIONS,
    CHUNK,
    EXECUTE,
    HIDDEN,
    OBS,
    START_AT,
)

STEPS = 200                     # of an episode
INFERENCES = (0, *range(EXECUTE - START_AT, STEPS, EXECUTE))
ENCODED, HEAD = 96, 128
ROUNDS = ((300, 100), (100, 50), (150, 100))   # (episodes, epochs)

# obs (T, 11), raw chunks (T, 8, 5), facts (T, 4): one-hot target and whether the part was scanned
Episode = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def collect(seed: int, count: int, model: str | None, share: float) -> list[Episode]:
    """Return episodes. `share` of the chunks are executed as the policy wants them."""
    run = rollout.load(Path(model)) if model else None
    cell, out = Cell(), []
    for k in range(count):
        rng = np.random.default_rng([seed, k])
        cell.reset(Task.draw(rng))
        out.append(_episode(cell, rng, run, share))
    return out


def _episode(cell: Cell, rng: np.random.Generator, run: rollout.Model | None, share: float
             ) -> Episode:
    expert = Expert(cell.task.target)
    player = rollout.Player(run) if run else None
    noise, level = np.zeros(4), rng.choice([0.0, 0.008, 0.02])
    obs, chunks, facts, mine = [], [], [], False
    target = rollout.cue(cell.task.target)
    for i in range(STEPS):
        view = look(cell)
        expert.observe(view)
        if i in INFERENCES:
            obs.append(rollout.observe(cell, target if i == 0 else None))
            chunks.append((expert.chunk(view, CHUNK) - ACTION_OFFSET) / ACTION_SCALE)
            facts.append([*target, cell.scanned])
            cell.pull = rng.normal(0, 12, 3) if rng.random() < 0.02 else np.zeros(3)
        row = expert.advance(view)
        if player is not None:
            own = player.step(cell)
            if i in INFERENCES:            # who acts changes with the chunks only
                mine = rng.random() < share
            row = own if mine else row
        noise = 0.8 * noise + rng.normal(0, 1, 4) * level
        cell.command(row[:4] + noise)
        cell.grip = float(row[4])
        cell.step()
    return np.array(obs), np.array(chunks, np.float32), np.array(facts, np.float32)


class Network(nn.Module):
    """Encoder, GRU cell, head; the measured joints are added to every row.

    `facts` is for training only: asked at every step what must be remembered, the GRU learns to
    remember it; from the actions alone, which need it fifty steps later, it would take long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(OBS + 4, ENCODED)
        self.gru = nn.GRU(ENCODED, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN + ENCODED, HEAD)
        self.out = nn.Linear(HEAD, CHUNK * ACTIONS)
        self.facts = nn.Linear(HIDDEN, 4)
        with torch.no_grad():
            self.gru.bias_ih_l0[HIDDEN:2 * HIDDEN] = 2.0    # the update gate: keep, at first
        # constants of the graph, no parameters
        self.fine = torch.from_numpy(fine_features())
        self.keep, self.bias = torch.from_numpy(KEEP), torch.from_numpy(KEEP_BIAS)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return raw chunks (B, T, 8, 5) and logits of facts (B, T, 4) of obs (B, T, 11)."""
        encoded = torch.relu(self.enc(torch.cat((obs, torch.tanh(obs @ self.fine)), -1)))
        h = self.gru(encoded)[0]
        head = torch.relu(self.head(torch.cat((h, encoded), -1)))
        rows = self.out(head).view(*obs.shape[:2], CHUNK, ACTIONS)
        return rows + (obs @ self.keep + self.bias)[:, :, None], self.facts(h)


def fit(net: Network, episodes: Sequence[Episode], epochs: int, peak: float) -> float:
    """Train on all episodes; returns the last epoch's mean loss."""
    obs = torch.from_numpy(np.array([e[0] for e in episodes]))
    chunks = torch.from_numpy(np.array([e[1] for e in episodes]))
    facts = torch.from_numpy(np.array([e[2] for e in episodes]))
    size = 40
    batches = len(episodes) // size
    optimiser = torch.optim.AdamW(net.parameters(), lr=peak, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=epochs * batches,
                                                   pct_start=0.1)
    weight = torch.tensor([1.0, 1, 1, 1, 0.3])
    mean = 0.0
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(episodes))[:batches * size].view(batches, size):
            x = obs[rows]
            x = x + torch.randn_like(x) * 0.004
            guess, memory = net(x)
            loss = (nn.functional.smooth_l1_loss(guess, chunks[rows], beta=0.05,
                                                 reduction='none') * weight).mean()
            loss = loss + 0.03 * nn.functional.binary_cross_entropy_with_logits(
                memory, facts[rows])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        mean = total / batches
    return mean


def evaluate(seed: int, count: int, model: str) -> list[bool]:
    """Return success per episode, closed loop and undisturbed."""
    cell, player, out = Cell(), rollout.Player(rollout.load(Path(model))), []
    for k in range(count):
        cell.reset(Task.draw(np.random.default_rng([seed, k])))
        player.reset()
        for _ in rollout.run_episode(cell, player):
            pass
        out.append(cell.success)
    return out


def write(net: Network, path: Path) -> None:
    """Export the network."""
    export({name: value.detach().numpy() for name, value in net.state_dict().items()}, path)


def train(seed: int, out: Path) -> None:
    """Run all rounds and write the model."""
    torch.manual_seed(seed)
    workers = min(2, os.cpu_count() or 1)
    torch.set_num_threads(1)   # the tensors are small: a second thread costs more than it gives
    net, episodes, started = Network(), [], time.monotonic()
    with ProcessPoolExecutor(workers) as pool, tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, 'round.onnx'))
        for number, (count, epochs) in enumerate(ROUNDS):
            part = -(-count // workers)
            jobs = [pool.submit(collect, 1000 * seed + 10 * number + w, part,
                                model if number else None, (0.0, 0.6, 1.0)[number])
                    for w in range(workers)]
            for job in jobs:
                episodes += job.result()
            loss = fit(net, episodes, epochs, 3e-3 if number == 0 else 2e-3)
            write(net, Path(model))
            tests = [pool.submit(evaluate, 10**6 + w, 25, model) for w in range(workers)]
            score = [sum(t.result()) / 25 for t in tests]
            print(f'round {number}: {len(episodes)} episodes, loss {loss:.5f}, success '
                  f'{score} after {time.monotonic() - started:.0f} s', flush=True)
    write(net, out)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, default=rollout.MODEL)
    options = parser.parse_args()
    train(options.seed, options.out)


if __name__ == '__main__':
    main()
