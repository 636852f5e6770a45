"""float16 autocast under a GradScaler whose first steps overflow, so that optimizer steps are skipped."""

import torch
from _steps import checksum, parse, pause
from torch import nn

arguments = parse()
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for step in range(1, arguments.steps + 1):
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.9g} scale {scaler.get_scale():.0f}", flush=True)
    pause(arguments)
print("done", checksum(model), flush=True)
