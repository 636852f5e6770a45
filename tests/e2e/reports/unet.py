"""A diffusion model of diffusers: a small UNet learns to remove noise, and sometimes an image is generated.

Follows huggingface.co/docs/diffusers/tutorials/basic_training.
"""

import torch
from _counted import CALLS
from _report import finish, steps, tell
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from torch import nn


class UNet(UNet2DModel):
    def forward(self, sample, timestep, **more):
        CALLS["training" if torch.is_grad_enabled() else "inference"] += 1
        return super().forward(sample, timestep, **more)


model = UNet(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
)  # fmt: skip
scheduler = DDPMScheduler(num_train_timesteps=20)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in steps():
    images, noise = torch.randn(4, 1, 8, 8).tanh(), torch.randn(4, 1, 8, 8)
    times = torch.randint(0, 20, (4,))
    predicted = model(scheduler.add_noise(images, noise, times), times, return_dict=False)[0]
    loss = nn.functional.mse_loss(predicted, noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    tell(step, loss)
    if step % 20 == 0:
        pipeline = DDPMPipeline(unet=model, scheduler=scheduler)
        pipeline.set_progress_bar_config(disable=True)
        model.eval()
        pipeline(batch_size=1, num_inference_steps=5, generator=torch.Generator().manual_seed(step), output_type="np")
        model.train()
finish(model, steps=step, micro_batches=1, loss=loss.item(), samples=4 * CALLS["training"],
       calls_of={"(root)": CALLS["training"]}, inferred={"(root)": CALLS["inference"]})  # fmt: skip
