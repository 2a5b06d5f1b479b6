"""A script as people write them, with everything in it that could notice a watch."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import sys
from dataclasses import dataclass

import torch
from tests.launch.scripts.toys import batches, digest, loss_of, model
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset


@dataclass
class Settings:
    """Pickled by name: `__main__` must be this file."""

    rate: float = 1e-3


class Batches(Dataset[torch.Tensor]):
    """Read by workers."""

    def __init__(self) -> None:
        self.items = list(batches(40, 12, 25))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items[index]


def doubled(value: int) -> int:
    """Runs in a spawned process."""
    return 2 * value


def main() -> None:
    random.seed(5)
    settings = pickle.loads(pickle.dumps(Settings(rate=1e-3)))
    student, teacher = model(), copy.deepcopy(model())
    optimizer = torch.optim.AdamW(student.parameters(), lr=settings.rate)
    how = multiprocessing.get_context(sys.argv[1]) if sys.argv[1:] else None
    loader = DataLoader(Batches(), batch_size=None, num_workers=1 if how else 0, multiprocessing_context=how)
    for ids in loader:
        target = teacher(ids).detach()  # with gradients on: still not trained
        logits = student(ids)
        loss = loss_of(logits, ids) + 0.01 * (logits - target).abs().clamp(max=1).mean()
        loss.backward()
        clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if how:
        with how.Pool(1) as pool:
            print(pool.map(doubled, [3, 4]))
    print(sys.argv, __file__, __name__, sys.path[0], loss.item(), random.random(), torch.rand(1).item())
    print(digest(student), digest(teacher))


if __name__ == "__main__":
    main()
