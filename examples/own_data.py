"""A dataset of pictures and a model for them (docs/own-data.md).

    cd examples
    torchrun --nproc-per-node=4 -m recycle_pp.train parallel=2x2 model=custom model.build=own_data:Classifier \
        model.layers=blocks model.sequence=1 data.build=own_data:pictures run.steps=60 +fail_at=20:1.1

The pictures are noise with one brighter quarter. The label is the number of this quarter.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Pictures:
    """512 pictures. Each is a function of its number alone, so every process sees the same ones."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        picture = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(i))
        quarter = i % 4
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        picture[:, row : row + 8, column : column + 8] += 1.0
        return {"pixel_values": picture, "labels": torch.tensor(quarter)}


def pictures() -> Pictures:
    return Pictures()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Classifier(nn.Module):
    """A small vision transformer: the mean loss of a micro-batch."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=4, stride=4)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2).contiguous() + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)
