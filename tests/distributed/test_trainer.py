"""transformers.Trainer in two ranks, by way of accelerate: attention with the bits of one process, and the same
parameters in every run."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import small_llama
import torch
from recorded import Recorded, assert_as_one_process
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Trained, assert_same_parameters, twice, whole_parameters
from transformers import Trainer, TrainingArguments

RANKS = 2


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    ids = torch.cat([small_llama.text(step) for step in range(STEPS)])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(folder: str) -> Trained:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=small_llama.BATCH // RANKS,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(small_llama.make(), arguments, train_dataset=Text())
    with Recorded() as recorded:
        trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) and arguments.world_size == RANKS
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    return Trained(whole_parameters(trainer.model), losses, recorded.calls)


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    ranks = launch.run(twice, RANKS, tmp_path, train, str(tmp_path / "out"))
    assert_same_parameters(*ranks)
    assert_as_one_process([rank.calls for rank in ranks], 0, small_llama.STEP * STEPS)
    assert len(ranks[0].losses) == STEPS
