"""A tokenizer of single bytes, and one thread for small models."""

import pytest


@pytest.fixture
def one_thread():
    """Keep the tests from fighting for cores."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocab = {"<|pad|>": 0, "<|end|>": 1}
    for byte in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<|pad|>", eos_token="<|end|>")
    made.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return made
