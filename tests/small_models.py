"""Real models of two layers, built on the spot, and what they say of an answer."""

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
    "mistral with a sliding window": MistralConfig(**SIZES, sliding_window=8),
    "gemma3 with both": Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
    ),
}


def build(name="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def scored(model, ids, answer_ids, temperature=1.0):
    """Log-probabilities of an answer from one plain forward pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *answer_ids]])).logits[0, len(ids) - 1 : -1].float() / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(answer_ids)[:, None])[:, 0].numpy()
