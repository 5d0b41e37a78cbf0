"""reinforce: a policy that learns to balance from episodes of various lengths, until it can."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

SIZES = {"quick": {"episodes": 240}, "soak": {"episodes": 500}}
TAKES = {
    "range(episodes // worker.num_workers)": "each worker plays its part of the run's episodes",
    "Balance(543 + worker.worker_id)": "with one seed, the episodes of all workers would start in the same state",
    "worker.mean(running)": "all workers stop after the same episode, as lockstep methods require",
    "if worker.worker_id == 0:": "every worker runs the loop; one prints",
}
LONGEST = 50


class Balance:
    """A stick that falls to where it leans; pushed to the left or to the right; an episode ends when it lies."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.angle, self.speed, self.steps = self.random.uniform(-0.1, 0.1), 0.0, 0
        return torch.tensor([self.angle, self.speed])

    def step(self, action):
        """What is seen then, and whether it is over."""
        self.speed += 0.1 * (2 * self.angle + (1.0 if action else -1.0))
        self.angle += 0.1 * self.speed
        self.steps += 1
        return torch.tensor([self.angle, self.speed]), abs(self.angle) > 0.5 or self.steps == LONGEST


def made():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def play(policy, environment):
    """One episode: the logarithms of the chosen actions' probabilities."""
    seen, is_over, logarithms = environment.reset(), False, []
    while not is_over:
        actions = Categorical(F.softmax(policy(seen.unsqueeze(0)), dim=1))
        action = actions.sample()
        logarithms.append(actions.log_prob(action))
        seen, is_over = environment.step(int(action))
    return logarithms


def steps_missing(policy):
    """By how many steps its episodes are too short on average."""
    environment = Balance(1)
    with torch.no_grad():
        lengths = []
        for _ in range(20):
            seen, is_over = environment.reset(), False
            while not is_over:
                seen, is_over = environment.step(int(policy(seen).argmax()))
            lengths.append(environment.steps)
    return LONGEST - sum(lengths) / len(lengths)


def loop(attach, episodes, folder=None):
    torch.manual_seed(543)
    policy = made()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    running = 10.0
    with attach(policy, optimizer) as worker:
        environment = Balance(543 + worker.worker_id)
        for episode in range(episodes // worker.num_workers):
            logarithms = play(policy, environment)
            running += 0.05 * (len(logarithms) - running)
            returns, following = [], 0.0
            for _ in logarithms:
                following = 1.0 + 0.99 * following
                returns.insert(0, following)
            returns = torch.tensor(returns)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            optimizer.zero_grad()
            (-torch.cat(logarithms) * returns).sum().backward()
            optimizer.step()
            if episode % 10 == 9:
                of_all = worker.mean(running)
                if worker.worker_id == 0:
                    print(f"episode {episode}: {of_all:.0f} steps on average")
                if of_all > 0.9 * LONGEST:
                    break
    return steps_missing(policy)
