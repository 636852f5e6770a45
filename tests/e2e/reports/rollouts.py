"""PPO: an actor and a critic roll out an environment, then learn in epochs of mini-batches.

Follows github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py.
"""

import time

import torch
from _counted import CALLS, Counted
from _report import arguments, finish, tell
from torch import nn

HORIZON, EPOCHS, PARTS = 16, 2, 2


class Actor(Counted, nn.Sequential):
    pass


actor = Actor(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
step, state = 0, torch.randn(1, 4)
while step < arguments.steps:
    states, actions, logs, rewards, values = [], [], [], [], []
    for _ in range(HORIZON):
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=actor(state))
            values.append(critic(state).view(()))
        action = policy.sample()
        states.append(state)
        actions.append(action)
        logs.append(policy.log_prob(action))
        rewards.append(-(state[0, action] ** 2).view(()))
        state = 0.9 * state + 0.1 * torch.randn(1, 4)
    with torch.no_grad():
        returns, value = [], critic(state).view(())
        for reward in reversed(rewards):
            value = reward + 0.9 * value
            returns.insert(0, value)
    states, actions, logs, returns = torch.cat(states), torch.cat(actions), torch.cat(logs), torch.stack(returns)
    advantages = returns - torch.stack(values)
    for _ in range(EPOCHS):
        for part in torch.randperm(HORIZON).chunk(PARTS):
            policy = torch.distributions.Categorical(logits=actor(states[part]))
            ratio = (policy.log_prob(actions[part]) - logs[part]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * advantages[part], clipped * advantages[part]).mean()
            loss = -gain + 0.5 * (critic(states[part]).view(-1) - returns[part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            tell(step, loss)
            time.sleep(arguments.pause)
finish(actor, critic, steps=step, micro_batches=1, loss=loss.item(), samples=CALLS["samples"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
