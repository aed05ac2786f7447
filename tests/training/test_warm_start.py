"""The warm start's own loss is TRL's, which the main job's policies were first made with."""

import datasets
import numpy as np
import pytest
import trl

from trace_gym.training import warm_start
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

SHAPE = PolicyShape(hidden=32, layers=2, mlp=32, vocabulary=300)


@pytest.mark.slow
def test_the_loss_is_trls(tmp_path):
    """Losses and gradients of the first updates are equal, rounding apart, with rows of any length and padding."""
    tokenizer = build_tokenizer(["a few words"], SHAPE)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        ids = rng.integers(8, 200, int(rng.integers(10, 60))).tolist()
        rows.append({"input_ids": ids, "assistant_masks": [int(place % 7 < 3) for place in range(len(ids))]})
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    options |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    options |= {"dataloader_pin_memory": False, "activation_checkpointing": False}
    told = []
    for ours in (True, False):
        trainer_class = warm_start._sft_trainer(8)
        if not ours:
            del trainer_class.compute_loss
        trainer = trainer_class(
            model=build_model(tokenizer, SHAPE, seed=0),
            args=trl.SFTConfig(output_dir=str(tmp_path), learning_rate=1e-3, **options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        told.append([(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row])
    assert len(told[0]) == 4
    np.testing.assert_allclose(told[0], told[1], rtol=1e-4)
