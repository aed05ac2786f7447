"""What the trainer overrides and calls of TRL is still as it was read.

If something here fails after an upgrade, read `training/rows_trainer.py` and `training/trainer.py` against the new TRL
before changing it.
"""

from __future__ import annotations

import inspect

import pytest
import transformers
import trl

SIGNATURES = {
    "get_train_dataloader": ["self"],
    "_get_dataloader": ["self", "dataset", "description", "batch_size", "sampler_fn", "is_training"],
    "_get_train_sampler": ["self", "dataset"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_methods_that_are_overridden_or_called_are_still_there(name: str) -> None:
    parameters = list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)
    assert parameters[: len(SIGNATURES[name])] == SIGNATURES[name]


def test_the_loss_still_reads_what_the_trainer_writes() -> None:
    """Keys of the micro-batch and normalisers of each loss type, as `_compute_loss` has them."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    for key in (
        "num_items_in_batch",
        "advantages",
        "tool_mask",
        "old_per_token_logps",
        "ref_per_token_logps",
    ):
        assert f'"{key}"' in source
    for line in (
        'if self.loss_type in ["grpo", "sapo"]:',
        "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
        "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
    ):
        assert line in source
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in inspect.getsource(
        trl.GRPOTrainer._prepare_inputs
    )
    assert "set_epoch(epoch)" in inspect.getsource(transformers.Trainer)
