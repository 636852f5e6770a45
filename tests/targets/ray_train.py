"""Ray Train on a local cluster: two workers, each a rank."""

import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train():
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        opt.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        opt.step()
        step += 1
        if step == 1:
            print(f"rank {dist.get_rank()} trains", flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False)
    scaling = ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1})
    TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(name="ranks")).fit()
    sys.exit(1)
